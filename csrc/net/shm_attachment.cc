#include "net/shm_attachment.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <new>

namespace kvpool {
namespace {

// Without waiting, whatever the client has made of the descriptor's flags: it shares them.
void quieten(int bell) {
  std::uint64_t rings = 0;
  iovec into{&rings, sizeof rings};
  if (preadv2(bell, &into, 1, -1, RWF_NOWAIT) < 0 && errno == EOPNOTSUPP)
    (void)!read(bell, &rings, sizeof rings);
}

Lane* lay_out(const SharedMemory& control, std::uint32_t lanes, std::uint64_t staging_bytes) {
  // All zeros are a page without pins and lanes without requests: nothing else is constructed, so
  // that nothing but what is meant is ever stored there.
  auto* header = reinterpret_cast<ControlHeader*>(control.base());
  *header = {kControlMagic, kControlVersion, lanes,     staging_bytes,
             kPageOffset,   kLanesOffset,    kLaneBytes};
  return reinterpret_cast<Lane*>(control.base() + kLanesOffset);
}

}  // namespace

// The bell of one lane.
class ShmAttachment::Bell final : public Source {
 public:
  Bell(std::shared_ptr<ShmAttachment> owner, std::size_t lane)
      : owner_(std::move(owner)), lane_(lane) {}
  int descriptor() const override { return owner_->bells_[lane_].get(); }
  Outcome on_ready(std::uint32_t) override {
    quieten(descriptor());
    LaneServe& lane = owner_->lanes_[lane_];
    switch (lane.serve()) {
      case LaneServe::Served::quiet:
        return Outcome::again;
      case LaneServe::Served::garbage:
        owner_->books_.note_garbage(lane.why_garbage());
        return Outcome::close_client;
      case LaneServe::Served::ended:
        break;
    }
    return Outcome::close;
  }
  void interrupt() override { owner_->end(); }
  void on_closed() override {}

 private:
  const std::shared_ptr<ShmAttachment> owner_;
  const std::size_t lane_;
};

// The socket. Nothing is said on it after the handshake: it is there to break.
class ShmAttachment::End final : public Source {
 public:
  End(std::shared_ptr<ShmAttachment> owner, std::shared_ptr<ClientBooks> client)
      : owner_(std::move(owner)), client_(std::move(client)) {}
  int descriptor() const override { return owner_->socket_.get(); }
  Outcome on_ready(std::uint32_t events) override {
    std::byte unwanted[64];
    const ssize_t got =
        (events & EPOLLIN) != 0 ? recv(descriptor(), unwanted, sizeof unwanted, MSG_DONTWAIT) : 0;
    if (got > 0) owner_->books_.note_garbage("an shm client sent something on its socket");
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Outcome::again;
    owner_->end();
    return Outcome::close_client;
  }
  void interrupt() override { owner_->end(); }
  void on_closed() override {
    owner_->end();
    owner_->let_go();
    client_->end_shm();
    shutdown(descriptor(), SHUT_RDWR);  // the client sees its end, though others hold the socket
  }

 private:
  const std::shared_ptr<ShmAttachment> owner_;
  const std::shared_ptr<ClientBooks> client_;
};

ShmAttachment::ShmAttachment(std::shared_ptr<Node> node, const ServerOptions& options,
                             Descriptor socket, ServerBooks& books)
    : node_(std::move(node)),
      books_(books),
      socket_(std::move(socket)),
      host_{.node = *node_, .books = books, .request_max = options.request_max} {}

ShmAttachment::~ShmAttachment() { let_go(); }

Result<std::shared_ptr<ShmAttachment>> ShmAttachment::create(std::shared_ptr<Node> node,
                                                             const ServerOptions& options,
                                                             Descriptor socket, ServerBooks& books,
                                                             ShmOffer& offer) {
  auto made = std::shared_ptr<ShmAttachment>(
      new ShmAttachment(std::move(node), options, std::move(socket), books));
  if (auto done = made->make(options); !done) return std::unexpected(done.error());
  if (auto done = made->describe(options, offer); !done) return std::unexpected(done.error());
  return made;
}

Result<void> ShmAttachment::make(const ServerOptions& options) {
  auto control = SharedMemory::create("kvpool-control", control_bytes(options.lanes));
  if (!control) return std::unexpected(control.error());
  auto staging = SharedMemory::create("kvpool-staging", options.staging_bytes);
  if (!staging) return std::unexpected(staging.error());
  control_ = std::move(*control);
  staging_ = std::move(*staging);
  host_.staging = staging_.base();
  host_.staging_bytes = staging_.bytes();
  Lane* const lanes = lay_out(control_, options.lanes, staging_.bytes());
  for (std::uint32_t i = 0; i < options.lanes; ++i) {
    bells_.emplace_back(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
    if (!bells_.back().is_open()) return fail_for(errno, "eventfd");
    auto* lane = reinterpret_cast<Lane*>(reinterpret_cast<std::byte*>(lanes) + i * kLaneBytes);
    lanes_.emplace_back(host_, *lane);
  }
  // The end of the socket is the end of the client, whoever shuts it down.
  const auto end = [this] {
    books_.note_garbage("an shm client pinned more than it may");
    shutdown(socket_.get(), SHUT_RDWR);
  };
  node_->attach(page(), {options.pin_bytes, end});
  is_attached_.store(true, std::memory_order_release);
  books_.shm_clients.fetch_add(1, std::memory_order_relaxed);
  return {};
}

Result<void> ShmAttachment::describe(const ServerOptions& options, ShmOffer& offer) const {
  offer = {.descriptors = {},
           .lanes = options.lanes,
           .staging_bytes = staging_.bytes(),
           .arena_bytes = node_->arena_bytes(),
           .index_bytes = node_->index_bytes(),
           .pin_bytes = options.pin_bytes};
  std::optional<Error> error;
  const auto give = [&](Result<int> descriptor) {
    if (descriptor)
      offer.descriptors.push_back(*descriptor);
    else if (!error)
      error = descriptor.error();
  };
  const auto copy_of = [](int own) -> Result<int> {
    const int copied = fcntl(own, F_DUPFD_CLOEXEC, 0);
    if (copied < 0) return fail_for(errno, "a descriptor for an shm client");
    return copied;
  };
  give(node_->open_arena());
  give(node_->open_index());
  give(copy_of(control_.descriptor()));
  give(copy_of(staging_.descriptor()));
  for (const Descriptor& bell : bells_) give(copy_of(bell.get()));
  if (!error) return {};
  for (const int number : offer.descriptors) close(number);
  return std::unexpected(*error);
}

std::vector<std::shared_ptr<Source>> ShmAttachment::sources(std::shared_ptr<ClientBooks> client) {
  std::vector<std::shared_ptr<Source>> made;
  const auto self = shared_from_this();
  client_ = client;
  host_.client = client_.get();
  for (std::size_t i = 0; i < lanes_.size(); ++i) made.push_back(std::make_shared<Bell>(self, i));
  made.push_back(std::make_shared<End>(self, std::move(client)));
  return made;
}

ClientTotals ShmAttachment::totals() const { return node_->client_totals(page()); }

void ShmAttachment::end() {
  host_.ended.store(true, std::memory_order_release);
  for (LaneServe& lane : lanes_) lane.interrupt();
}

void ShmAttachment::let_go() {
  if (!is_attached_.exchange(false, std::memory_order_acq_rel)) return;
  node_->detach(page());
  books_.shm_clients.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace kvpool
