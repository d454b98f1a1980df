#include "net/server.h"

#include "net/server_parts.h"
#include "net/socket_io.h"
#include "net/stream_serve.h"

namespace kvpool {
namespace {

constexpr std::uint64_t kPinShare = 4;  // one client may pin a quarter of the pool

ServerOptions with_defaults(ServerOptions options, std::uint64_t bytes_limit) {
  if (options.pin_bytes == 0) options.pin_bytes = bytes_limit / kPinShare;
  return options;
}

}  // namespace

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() { close(); }

Result<std::unique_ptr<Server>> Server::create(std::shared_ptr<Node> node,
                                               const ServerOptions& options) {
  auto reactor = Reactor::create(options.sources_max);
  if (!reactor) return std::unexpected(reactor.error());
  const ServerOptions wanted = with_defaults(options, node->stats().bytes_limit);
  return std::unique_ptr<Server>(
      new Server(std::make_unique<Impl>(std::move(node), wanted, std::move(*reactor))));
}

std::uint64_t Server::add_client() {
  const std::lock_guard lock(impl_->mutex);
  const std::uint64_t number = impl_->next_client++;
  impl_->clients.emplace(number, Impl::Client{.books = std::make_shared<ClientBooks>(
                                                  number, *impl_->node, impl_->books),
                                              .shm = {},
                                              .started = {}});
  return number;
}

void Server::drop_client(std::uint64_t client) {
  Impl::Client dropped;  // what was made and not started ends outside the lock
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = impl_->clients.find(client);
    if (found == impl_->clients.end()) return;
    dropped = std::move(found->second);
    impl_->clients.erase(found);
  }
  impl_->reactor->drop(client);
}

Result<void> Server::add_stream(std::uint64_t client, int descriptor, StreamKind kind,
                                const HolderName& peer) {
  Descriptor socket(descriptor);
  const auto books = impl_->books_of(client);
  if (!books) return fail(Code::refused, "there is no client of this number (any more)");
  bool is_unix = false;
  if (auto ready = prepare_stream(socket.get(), is_unix); !ready) return ready;
  auto stream = std::make_shared<StreamServe>(
      std::move(socket), is_unix,
      StreamServe::Host{*impl_->node, impl_->options, impl_->books, books, impl_->directory,
                        impl_->far, kind, peer});
  auto added = impl_->reactor->add(client, {std::move(stream)});
  // Dropped in between: then nobody else will close this stream.
  if (added && !impl_->books_of(client)) impl_->reactor->drop(client);
  return added;
}

void Server::set_directory(std::shared_ptr<DirectoryService> directory) {
  impl_->directory.set(std::move(directory));
}

void Server::expire_far_leases(Deadline now) {
  const std::size_t expired = impl_->far.expire(now - impl_->options.far_lease_max);
  impl_->books.far_expired.fetch_add(expired, std::memory_order_relaxed);
}

ServerStats Server::stats() const {
  const ServerBooks& books = impl_->books;
  const auto read = [](const std::atomic<std::uint64_t>& count) {
    return count.load(std::memory_order_relaxed);
  };
  ServerStats stats;
  {
    const std::lock_guard lock(impl_->mutex);
    stats.clients = impl_->clients.size();
  }
  stats.streams = read(books.streams);
  stats.shm_clients = read(books.shm_clients);
  stats.threads = impl_->reactor->threads();
  stats.leases = read(books.leases);
  stats.requests = read(books.requests);
  stats.closed_garbage = read(books.closed_garbage);
  stats.closed_late = read(books.closed_late);
  stats.bytes_in = read(books.bytes_in);
  stats.bytes_out = read(books.bytes_out);
  stats.far_leases = read(books.far_leases);
  stats.far_lent_bytes = read(books.far_lent_bytes);
  stats.far_expired = read(books.far_expired);
  stats.last_closed = books.last_closed();
  return stats;
}

std::size_t Server::sources() const { return impl_->reactor->sources(); }

std::size_t Server::sources_of(std::uint64_t client) const {
  return impl_->reactor->sources_of(client);
}

bool Server::drain(Deadline deadline) {
  impl_->books.draining.store(true, std::memory_order_relaxed);
  return impl_->reactor->drain(deadline);
}

void Server::close() { impl_->reactor->close(); }

}  // namespace kvpool
