#include "cluster/locate_round.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "net/socket_io.h"

namespace kvpool {
namespace {

using std::chrono::steady_clock;

std::size_t body_bytes_of(std::size_t names, std::size_t keys) {
  return sizeof(LocatedHead) + names * sizeof(HolderName) +
         keys * kHoldersPerKey * sizeof(std::uint16_t);
}

}  // namespace

// What one owner is asked, and what of its answer has come.
struct LocateRound::Question {
  Question() = default;
  Question(const Question&) = delete;
  Question& operator=(const Question&) = delete;
  ~Question() {
    if (is_open()) give_up(Miss::absent);  // no memory: what still comes belongs to nobody
  }

  MemberHandle owner = kNoMember;
  std::shared_ptr<Peer> peer;  // nullptr: this node itself
  std::vector<DirectoryKey> keys;
  std::vector<std::uint32_t> which;  // of the round's keys
  std::optional<StreamPool::Loan> loan;
  bool is_busy = false;  // others use its streams
  std::uint64_t id = 0;  // 0: not asked
  steady_clock::time_point began;
  std::vector<std::byte> come;
  std::size_t bytes = 0;

  bool is_open() const { return id != 0; }
  StreamClient& stream() const { return loan->one(); }
  void send(StreamPool::Loan lent, Deadline deadline, Miss& why) {
    loan.emplace(std::move(lent));
    began = steady_clock::now();
    id = stream().start_get({.op = Op::locate, .keys = keys, .deadline = deadline});
    if (id != 0) return;
    why = steady_clock::now() >= deadline ? Miss::timed_out : Miss::disconnected;
    loan.reset();
    peer->failed(why, steady_clock::now() - began);
  }
  void give_up(Miss why) {
    stream().abandon();
    close();
    if (why == Miss::absent) return peer->not_asked();
    peer->failed(why, steady_clock::now() - began);
  }
  // Others may have the stream, however long the rest of the round takes.
  void close() {
    id = 0;
    loan.reset();
  }
  Answer answer() const {
    Answer head;
    std::memcpy(&head, come.data(), sizeof head);
    return head;
  }
  // False: what came answers nothing that was asked.
  bool fits() const {
    const Answer head = answer();
    return head.magic == kAnswerMagic && head.version == kFrameVersion && head.op == Op::locate &&
           head.id == id && head.body_bytes <= body_bytes_of(kMembersMax, keys.size());
  }
  // Not now, by one that works.
  bool is_refused() const {
    const auto refusal = static_cast<Refusal>(answer().failed);
    return refusal != Refusal::none && refusal != Refusal::draining;
  }
  // Bytes of the whole answer, as far as is known.
  std::size_t wanted() const {
    return sizeof(Answer) + (bytes < sizeof(Answer) ? 0 : answer().body_bytes);
  }
  enum class Took : std::uint8_t { some, all, nonsense, end };
  Took take();
};

LocateRound::Question::Took LocateRound::Question::take() {
  for (;;) {
    if (bytes >= sizeof(Answer) && !fits()) return Took::nonsense;
    if (bytes == wanted()) return Took::all;
    come.resize(wanted());
    const ssize_t got =
        recv(stream().descriptor(), come.data() + bytes, come.size() - bytes, MSG_DONTWAIT);
    if (got > 0) bytes += static_cast<std::size_t>(got);
    if (got > 0 || (got < 0 && errno == EINTR)) continue;
    return got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK) ? Took::some : Took::end;
  }
}

Miss LocateRound::run(std::span<const DirectoryKey> keys, Deadline deadline,
                      std::span<Whereabouts> answers) {
  Miss why = Miss::none;
  Questions questions = questions_for(keys, why);
  // All are asked before any is heard; those who cost nothing last, and behind them those who have
  // to be waited for, so that one member that hangs takes no time from the others.
  for (const auto& question : questions)
    if (question->peer != nullptr) ask(*question, deadline, why);
  for (const auto& question : questions)
    if (question->peer == nullptr) ask_own(*question, answers);
  ask_busy(questions, deadline, why);
  hear(questions, deadline, answers, why);
  return why;
}

LocateRound::Questions LocateRound::questions_for(std::span<const DirectoryKey> keys,
                                                  Miss& why) const {
  Questions questions;
  std::unordered_map<MemberHandle, std::size_t> of_owner;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const MemberHandle owner = members_.owner_of(keys[i]);
    const auto [at, is_new] = of_owner.try_emplace(owner, questions.size());
    if (is_new) {
      questions.push_back(std::make_unique<Question>());
      questions.back()->owner = owner;
      if (owner != members_.self) questions.back()->peer = peers_.of(owner);
    }
    questions[at->second]->keys.push_back(keys[i]);
    questions[at->second]->which.push_back(static_cast<std::uint32_t>(i));
  }
  std::erase_if(questions, [&](const auto& question) {
    const bool is_own = question->owner == members_.self && own_ != nullptr;
    const bool is_nobody = question->peer == nullptr && (!is_own || question->owner == kNoMember);
    if (is_nobody) why = Miss::disconnected;
    return is_nobody;
  });
  return questions;
}

void LocateRound::ask(Question& question, Deadline deadline, Miss& why) {
  if (!question.peer->may_ask()) {
    why = Miss::disconnected;
    return;
  }
  auto loan = question.peer->try_short(question.is_busy);
  if (!loan.empty()) return question.send(std::move(loan), deadline, why);
  if (question.is_busy) return;
  why = Miss::disconnected;
  question.peer->failed(why);
}

// In half of the time, all together. What the others answer meanwhile is kept by the kernel.
void LocateRound::ask_busy(const Questions& questions, Deadline deadline, Miss& why) {
  const auto now = steady_clock::now();
  const Deadline until = now + (deadline - now) / 2;
  for (const auto& question : questions) {
    if (!question->is_busy) continue;
    bool late = false;
    auto loan = question->peer->borrow_short(until, late);
    if (!loan.empty()) {
      question->send(std::move(loan), deadline, why);
      continue;
    }
    why = late ? Miss::timed_out : Miss::disconnected;
    // Busy is not broken.
    late ? question->peer->not_asked() : question->peer->failed(why);
  }
}

// Until all have answered or the deadline has come.
void LocateRound::hear(const Questions& questions, Deadline deadline,
                       std::span<Whereabouts> answers, Miss& why) {
  using Took = Question::Took;
  std::vector<pollfd> ready;
  std::vector<Question*> open;
  for (;;) {
    ready.clear();
    open.clear();
    for (const auto& question : questions) {
      if (!question->is_open()) continue;
      ready.push_back({.fd = question->stream().descriptor(), .events = POLLIN, .revents = 0});
      open.push_back(question.get());
    }
    if (open.empty()) return;
    const int ms = poll_ms(deadline);  // 0: a last look
    poll(ready.data(), ready.size(), ms);
    for (std::size_t i = 0; i < open.size(); ++i) {
      const Took took = ready[i].revents == 0 ? Took::some : open[i]->take();
      if (took == Took::some) continue;
      if (took != Took::end) {
        end(*open[i], took == Took::all, answers, why);
      } else {
        why = Miss::disconnected;
        open[i]->give_up(why);
      }
    }
    if (ms == 0) break;
  }
  for (Question* question : open) {
    if (!question->is_open()) continue;
    why = Miss::timed_out;
    question->give_up(why);
  }
}

// Whatever it says, it is an answer: the member is there.
void LocateRound::end(Question& question, bool is_whole, std::span<Whereabouts> answers,
                      Miss& why) const {
  const bool is_good = is_whole && use(question, answers);
  if (!is_good) why = Miss::disconnected;
  if (!is_good && !(is_whole && question.is_refused())) {
    const bool is_draining = is_whole && question.answer().failed != 0;
    return question.give_up(is_draining ? Miss::disconnected : Miss::damaged);
  }
  if (is_good) question.peer->note_load(question.answer().load);
  question.peer->succeeded(steady_clock::now() - question.began);
  question.close();
}

// False: it is no answer to work with.
bool LocateRound::use(const Question& question, std::span<Whereabouts> answers) const {
  const std::byte* at = question.come.data() + sizeof(Answer);
  const Answer head = question.answer();
  LocatedHead located;
  if (head.failed != 0 || head.body_bytes < sizeof located) return false;
  std::memcpy(&located, at, sizeof located);
  if (head.body_bytes != body_bytes_of(located.names, question.keys.size())) return false;
  at += sizeof located;
  std::vector<MemberHandle> holders(located.names);
  for (MemberHandle& holder : holders) {
    HolderName name;
    std::memcpy(&name, at, sizeof name);
    at += sizeof name;
    holder = holder_of(name);
  }
  std::vector<std::array<std::uint16_t, kHoldersPerKey>> indexes(question.keys.size());
  std::memcpy(indexes.data(), at, indexes.size() * sizeof indexes[0]);
  const auto is_none = [&](std::uint16_t index) {
    return index != kNoHolder && index >= holders.size();
  };
  // Before any of it is believed.
  for (const auto& of_key : indexes)
    if (std::ranges::any_of(of_key, is_none)) return false;
  for (std::size_t k = 0; k < indexes.size(); ++k) {
    Whereabouts& answer = answers[question.which[k]];
    std::size_t count = 0;
    for (const std::uint16_t index : indexes[k])
      if (index != kNoHolder && holders[index] != kNoMember)
        answer.holders[count++] = holders[index];
    answer.is_known = true;
  }
  return true;
}

void LocateRound::ask_own(const Question& question, std::span<Whereabouts> answers) {
  Located found;
  own_->locate(question.keys, found);
  for (std::size_t i = 0; i < question.which.size() && i < found.holders.size(); ++i) {
    Whereabouts& answer = answers[question.which[i]];
    std::size_t count = 0;
    for (const std::uint16_t index : found.holders[i])
      if (index < found.names.size())
        if (const MemberHandle holder = holder_of(found.names[index]); holder != kNoMember)
          answer.holders[count++] = holder;
    answer.is_known = true;
  }
}

// kNoMember: this node itself, whoever is no member (now), and lives that are over.
MemberHandle LocateRound::holder_of(const HolderName& name) const {
  const MemberView::Member* member = members_.by_id(name.id);
  if (member == nullptr || member->info.incarnation != name.incarnation) return kNoMember;
  return member->handle == members_.self ? kNoMember : member->handle;
}

}  // namespace kvpool
