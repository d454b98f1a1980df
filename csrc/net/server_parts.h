// What a Server is made of; for its own files only.
#pragma once
#include <mutex>
#include <unordered_map>

#include "net/directory_service.h"
#include "net/reactor.h"
#include "net/server.h"
#include "net/source.h"

namespace kvpool {

class ShmAttachment;

struct Server::Impl {
  struct Client {
    std::shared_ptr<ClientBooks> books;
    std::shared_ptr<ShmAttachment> shm;  // made, and not yet started
    std::weak_ptr<ShmAttachment> started;
  };

  Impl(std::shared_ptr<Node> served, const ServerOptions& wanted, std::unique_ptr<Reactor> threads)
      : node(std::move(served)), options(wanted), reactor(std::move(threads)) {
    far.open();
    books.puts.set(wanted.put_bytes_per_s);
    books.gets.set(wanted.get_bytes_per_s);
  }

  // nullptr: there is no such client (any more).
  std::shared_ptr<ClientBooks> books_of(std::uint64_t client) {
    const std::lock_guard lock(mutex);
    const auto found = clients.find(client);
    return found == clients.end() ? nullptr : found->second.books;
  }

  const std::shared_ptr<Node> node;
  const ServerOptions options;
  ServerBooks books;
  Leases far{*node, books.far_leases};  // of all peers
  DirectoryDoor directory;
  std::mutex mutex;  // guards the fields below
  std::unordered_map<std::uint64_t, Client> clients;
  std::uint64_t next_client = 1;
  const std::unique_ptr<Reactor> reactor;  // last: its sources use all above until they are closed
};

}  // namespace kvpool
