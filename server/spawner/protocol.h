#pragma once
// What gpupool-server asks gpupool-spawner: requests and answers, one datagram each, over the SOCK_SEQPACKET
// pair whose end is the spawner's descriptor 3. One answer to each request, in their order; before them one
// that says whether the spawner can do its work. Both are of one build and one machine: structs in memory's
// order.
//
// The spawner ends when the server's end closes, and its workers with it, but for those whose sessions the
// server's next life may go on with.

#include <cstdint>

namespace gpupool::server {

inline constexpr int kSpawnerSocket = 3;
inline constexpr uint32_t kSpawnerMagic = 0x57505347;

enum class SpawnerOperation : uint32_t {
  // A worker under a user id that no other process has. Descriptors: the program (O_PATH), the worker's
  // control socket, and a memory file: `arguments` texts and then `variables` texts, each with a zero byte
  // behind it. The answer has the process's id, and a pidfd as its descriptor.
  start = 1,
  kill,         // SIGKILL to the worker `pid` and its process group
  reap,         // the worker `pid` is gone (its pidfd says so): the answer has its status as of wait(2)
  killEarlier,  // SIGKILL to a worker of an earlier life of the server. Descriptor: its pidfd
  outlive,      // the worker `pid` is not killed when the server's end closes
  spare,  // nothing is started under the user id of such a worker before it is gone. Descriptor: its pidfd
};

struct SpawnerRequest {
  uint32_t magic = kSpawnerMagic;
  SpawnerOperation operation{};
  int32_t pid = 0;
  uint32_t arguments = 0, variables = 0;
};

struct SpawnerAnswer {
  int32_t error = 0;  // errno; 0: done
  int32_t pid = 0;
  int32_t status = 0;
};

inline constexpr uint32_t kMostSpawnerTexts = 4096;      // of each kind
inline constexpr uint64_t kMostSpawnerBytes = 4u << 20;  // of the memory file

}  // namespace gpupool::server
