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
  MemberHandle owner = kNoMember;
  std::shared_ptr<Peer> peer;  // nullptr: this node itself
  std::vector<DirectoryKey> keys;
  std::vector<std::uint32_t> which;  // of the round's keys
  std::optional<StreamPool::Loan> loan;
  std::uint64_t id = 0;  // 0: not asked
  steady_clock::time_point began;
  std::vector<std::byte> come;
  std::size_t bytes = 0;

  bool is_open() const { return id != 0; }
  StreamClient& stream() const { return loan->one(); }
  void give_up(Miss why) {
    stream().abandon();
    peer->failed(why);
    id = 0;
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
  bool is_refused() const { return bytes >= sizeof(Answer) && fits() && answer().failed != 0; }
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
  // All are asked before any is heard; those who cost nothing last.
  for (const auto& question : questions)
    if (question->peer != nullptr) ask(*question, deadline, why);
  for (const auto& question : questions)
    if (question->peer == nullptr) ask_own(*question, answers);
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

bool LocateRound::ask(Question& question, Deadline deadline, Miss& why) {
  if (!question.peer->may_ask()) {
    why = Miss::disconnected;
    return false;
  }
  bool late = false;
  auto loan = question.peer->borrow_short(deadline, late);
  if (loan.empty()) {
    why = late ? Miss::timed_out : Miss::disconnected;
    // Busy is not broken.
    late ? question.peer->not_asked() : question.peer->failed(why);
    return false;
  }
  question.loan.emplace(std::move(loan));
  question.began = steady_clock::now();
  question.id =
      question.stream().start_get({.op = Op::locate, .keys = question.keys, .deadline = deadline});
  if (question.id != 0) return true;
  why = steady_clock::now() >= deadline ? Miss::timed_out : Miss::disconnected;
  question.peer->failed(why);
  return false;
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
    const int ms = poll_ms(deadline);
    if (ms == 0) break;
    poll(ready.data(), ready.size(), ms);
    for (std::size_t i = 0; i < open.size(); ++i) {
      const Took took = ready[i].revents == 0 ? Took::some : open[i]->take();
      if (took == Took::some) continue;
      const bool is_good = took == Took::all && use(*open[i], answers);
      if (is_good) {
        open[i]->peer->note_load(open[i]->answer().load);
        open[i]->peer->succeeded(steady_clock::now() - open[i]->began);
        open[i]->id = 0;
      } else {
        why = Miss::disconnected;
        open[i]->give_up(took == Took::end || open[i]->is_refused() ? why : Miss::damaged);
      }
    }
  }
  why = Miss::timed_out;
  for (Question* question : open) question->give_up(why);
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
  for (const std::uint32_t i : question.which) {
    std::array<std::uint16_t, kHoldersPerKey> indexes;
    std::memcpy(&indexes, at, sizeof indexes);
    at += sizeof indexes;
    std::size_t count = 0;
    for (const std::uint16_t index : indexes) {
      if (index == kNoHolder) break;
      if (index >= holders.size()) return false;
      if (holders[index] != kNoMember) answers[i].holders[count++] = holders[index];
    }
    answers[i].is_known = true;
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
