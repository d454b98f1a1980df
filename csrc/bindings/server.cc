// The connections of a node, for the daemon: it makes the handshakes and hands sockets over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind.h"
#include "bindings/gil.h"
#include "bindings/handles.h"
#include "net/server.h"
#include "tier/descriptor.h"

namespace kvpool {
namespace {

namespace nb = nanobind;
using nb::literals::operator""_a;

// Threads of the server run until close(): without the GIL, since one may hold a node's lock that
// a caller of Python waits for.
using ServerHandle = std::shared_ptr<Server>;

ServerHandle create(const NodeHandle& node, const ServerOptions& options) {
  usable(node);
  auto server = value_or_raise(Server::create(node, options));
  return {server.release(), [node](Server* s) {
            if (node->is_forked()) return;
            const GilReleased released;
            delete s;
          }};
}

void add_stream(const ServerHandle& server, std::uint64_t client, int descriptor, bool is_peer,
                const nb::bytes& node, std::uint64_t incarnation) {
  HolderName peer{.id = {}, .incarnation = incarnation};
  if (node.size() != 0 && (node.size() != kHashBytes || !is_peer)) {
    const Descriptor refused(descriptor);
    raise_bad_argument("node has " + std::to_string(node.size()) +
                       " bytes; it must have 16, and is of a peer only");
  }
  if (node.size() != 0) peer.id = Hash128::from_bytes(node.c_str());
  value_or_raise(server->add_stream(client, descriptor,
                                    is_peer ? StreamKind::peer : StreamKind::client, peer));
}

using Info = nb::typed<nb::dict, nb::str, nb::int_>;

nb::typed<nb::tuple, std::vector<int>, Info> make_shm(const ServerHandle& server,
                                                      std::uint64_t client, int descriptor) {
  const ShmOffer offer = value_or_raise([&] {
    const GilReleased released;
    return server->make_shm(client, descriptor);
  }());
  Info info;
  info["lanes"] = offer.lanes;
  info["staging_bytes"] = offer.staging_bytes;
  info["arena_bytes"] = offer.arena_bytes;
  info["index_bytes"] = offer.index_bytes;
  info["pin_bytes"] = offer.pin_bytes;
  return nb::typed<nb::tuple, std::vector<int>, Info>(
      nb::make_tuple(nb::cast(offer.descriptors), info));
}

nb::typed<nb::dict, nb::str, nb::any> stats(const ServerHandle& server) {
  const ServerStats s = server->stats();
  nb::typed<nb::dict, nb::str, nb::any> d;
  d["clients"] = s.clients;
  d["streams"] = s.streams;
  d["shm_clients"] = s.shm_clients;
  d["threads"] = s.threads;
  d["leases"] = s.leases;
  d["far_leases"] = s.far_leases;
  d["far_lent_bytes"] = s.far_lent_bytes;
  d["far_expired"] = s.far_expired;
  d["requests"] = s.requests;
  d["closed_garbage"] = s.closed_garbage;
  d["closed_late"] = s.closed_late;
  d["bytes_in"] = s.bytes_in;
  d["bytes_out"] = s.bytes_out;
  d["last_closed"] = s.last_closed;
  return d;
}

using Facts = nb::typed<nb::dict, nb::str, nb::any>;

Facts facts_of(const ClientStats& client) {
  Facts d;
  d["number"] = client.number;
  d["bytes_in"] = client.bytes_in;
  d["bytes_out"] = client.bytes_out;
  d["requests"] = client.requests;
  d["leases"] = client.leases;
  d["leased_bytes"] = client.leased_bytes;
  d["shm"] = client.has_shm;
  d["gets"] = client.reads.gets;
  d["get_blocks"] = client.reads.get_blocks;
  d["get_bytes"] = client.reads.get_bytes;
  d["views"] = client.reads.views;
  d["view_blocks"] = client.reads.view_blocks;
  return d;
}

nb::typed<nb::list, Facts> clients(const ServerHandle& server) {
  const std::vector<ClientStats> all = [&] {
    const GilReleased released;
    return server->clients();
  }();
  nb::typed<nb::list, Facts> list;
  for (const ClientStats& client : all) list.append(facts_of(client));
  return list;
}

std::vector<std::uint64_t> lease_ages(const ServerHandle& server) {
  const GilReleased released;
  const LeaseAges::Counts counts = server->lease_ages();
  return {counts.begin(), counts.end()};
}

}  // namespace

void bind_server(nb::module_& m) {
  nb::class_<Server>(m, "Server", "The connections of a node. Thread-safe; see net/server.h.")
      .def_static(
          "create",
          [](const NodeHandle& node, std::uint32_t max_sources, std::uint32_t lanes,
             std::uint64_t staging_bytes, std::uint64_t pin_bytes, std::uint64_t put_bytes_per_s,
             std::uint64_t get_bytes_per_s) {
            ServerOptions options{max_sources, lanes, staging_bytes, pin_bytes};
            options.put_bytes_per_s = put_bytes_per_s;
            options.get_bytes_per_s = get_bytes_per_s;
            return create(node, options);
          },
          "node"_a, "max_sources"_a = 2048, "lanes"_a = 4, "staging_bytes"_a = 64ull << 20,
          "pin_bytes"_a = 0, "put_bytes_per_s"_a = 0, "get_bytes_per_s"_a = 0)
      .def("add_client", [](const ServerHandle& s) { return s->add_client(); })
      .def(
          "drop_client",
          [](const ServerHandle& s, std::uint64_t client) {
            const GilReleased released;
            s->drop_client(client);
          },
          "client"_a, "Close all connections of a client.")
      .def(
          "add_stream", &add_stream, "client"_a, "descriptor"_a, "is_peer"_a = false,
          "node"_a = nb::bytes("", 0), "incarnation"_a = 0,
          "The socket is the server's from here on, also on failure. is_peer: another node, which\n"
          "has proved that it belongs to the cluster, is at its other end. node, incarnation: as\n"
          "whom; it may tell in no other name, and without one it may only ask.")
      .def("make_shm", &make_shm, "client"_a, "descriptor"_a,
           "(descriptors to be sent and closed, what the client must know). The socket is the\n"
           "server's from here on, also on failure; start_shm() once the offer was sent.")
      .def(
          "start_shm", [](const ServerHandle& s, std::uint64_t client) { s->start_shm(client); },
          "client"_a)
      .def("stats", &stats)
      .def("clients", &clients,
           "What each client has done and holds. gets: copies out, views: in place; their blocks\n"
           "and bytes are those that were delivered. Releases the GIL; about 1 us a client.")
      .def("lease_ages", &lease_ages,
           "How many leases are younger than 1, 10, 60 and 600 s, and older. Releases the GIL.")
      .def(
          "set_rates",
          [](const ServerHandle& s, std::uint64_t put_bytes_per_s, std::uint64_t get_bytes_per_s) {
            s->set_rates(put_bytes_per_s, get_bytes_per_s);
          },
          "put_bytes_per_s"_a, "get_bytes_per_s"_a,
          "Payload that all connections together may put and get, from now on; 0: no limit. What\n"
          "is over it is refused as `limited`. Shared memory is read without a limit.")
      .def_prop_ro("sources", [](const ServerHandle& s) { return s->sources(); })
      .def(
          "sources_of",
          [](const ServerHandle& s, std::uint64_t client) { return s->sources_of(client); },
          "client"_a, "Connections and lanes that a client has now.")
      .def(
          "drain",
          [](const ServerHandle& s, nb::handle timeout_s) {
            const auto deadline = deadline_after(timeout_s);
            const GilReleased released;
            return s->drain(deadline);
          },
          "timeout_s"_a,
          "Refuse new requests and wait for those under way; False: some were not done in time.")
      .def("close", [](const ServerHandle& s) {
        const GilReleased released;
        s->close();
      });
}

}  // namespace kvpool
