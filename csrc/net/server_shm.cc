// The shm attachments of a server: made when a client asks, started once it has what it needs.
#include "net/server_parts.h"
#include "net/shm_attachment.h"

namespace kvpool {

Result<ShmOffer> Server::make_shm(std::uint64_t client, int descriptor) {
  Descriptor socket(descriptor);
  const auto may_have = [&](const Impl::Client& one) { return !one.shm && !one.books->has_shm; };
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = impl_->clients.find(client);
    if (found == impl_->clients.end()) return fail(Code::refused, "there is no such client");
    if (!may_have(found->second)) return fail(Code::refused, "this client has an attachment");
  }
  // Without the lock: it makes and maps memory.
  ShmOffer offer;
  auto made =
      ShmAttachment::create(impl_->node, impl_->options, std::move(socket), impl_->books, offer);
  if (!made) return std::unexpected(made.error());
  const std::lock_guard lock(impl_->mutex);
  const auto found = impl_->clients.find(client);
  if (found == impl_->clients.end() || !may_have(found->second)) {
    for (const int number : offer.descriptors) ::close(number);
    return fail(Code::refused, "this client is gone, or has an attachment");
  }
  found->second.shm = std::move(*made);
  return offer;
}

void Server::start_shm(std::uint64_t client) {
  std::shared_ptr<ShmAttachment> attachment;
  std::shared_ptr<ClientBooks> books;
  {
    const std::lock_guard lock(impl_->mutex);
    const auto found = impl_->clients.find(client);
    if (found == impl_->clients.end() || !found->second.shm) return;
    attachment = std::move(found->second.shm);
    found->second.started = attachment;
    books = found->second.books;
    books->begin_shm();
  }
  // Refused (no room for more sources, closing): the socket closes with the attachment.
  if (!impl_->reactor->add(client, attachment->sources(books)))
    books->end_shm();
  else if (!impl_->books_of(client))
    impl_->reactor->drop(client);  // dropped in between: nobody else will close these sources
}

}  // namespace kvpool
