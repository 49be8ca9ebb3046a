#pragma once
// What a server and its worker programs agree on. A server of a newer build still starts workers of older
// ones, for clients of those builds; and a worker of either may take over what another has left.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace gpupool::server {

// A server leaves out worker programs of another number. server/tests/worker_interface_test pins the parts
// below as far as they can be listed. A change raises it if an older worker under this
// server, or the other way round, would do something wrong; that is one of
//   * WorkerOrder, WorkerReport and the structs in them (schema/worker.capnp), but for fields with a default
//     that means what there was before;
//   * the command line (kWorkerUsage), the numbers of descriptors, signals and exit codes (worker_process.h);
//   * the protocols of copier and worker (copier/protocol.h) and of the state socket, and the streams and
//     pages over it that the server reads, keeps and plays (files/, STATE_FORMAT in schema/record.capnp);
//   * what workers of one lease share: the cells of events (worker/shared_events.h), the module cache's
//   files.
inline constexpr uint32_t kWorkerInterface = 2;

// What a worker program is, as `gpupool-worker --identify` prints it.
struct WorkerIdentity {
  uint32_t interface = kWorkerInterface;
  uint64_t rows = 0;    // schema::rowsHash(): of the clients that it serves
  uint32_t frames = 0;  // schema::kProtocolVersion, which `rows` covers; for people
  std::string release;  // of gpupool; for people
};

// One line; what follows the four words is a later version's, and passed over.
std::string textOf(const WorkerIdentity& identity);
std::optional<WorkerIdentity> parseWorkerIdentity(std::string_view line);

}  // namespace gpupool::server
