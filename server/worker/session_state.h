#pragma once
// What a session is, for another worker (schema/record.capnp): read from the session while everything stands
// still and its device memory is with the copier, and sent.
//
//   old worker -> new worker   SessionRecord, as one block
//                              descriptors: words, staging memory, the link to the copier (if there are
//                              pieces), pinned memory by ascending address
//                              the bytes of variables and arrays, one block each, in the record's order
//   new worker -> old worker   one block: empty, the session is rebuilt; or why not, for people. Before it,
//                              4 bytes: the number of its last message to the copier

#include <string>

#include "server/copier/link.h"
#include "server/worker/session.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

inline constexpr uint64_t kMostRecordBytes = uint64_t{2} << 30;
inline constexpr uint64_t kMostContentBytes = uint64_t{256} << 30;  // of one array
inline constexpr uint64_t kMostRefusalBytes = 4096;

// "" or why the session cannot be rebuilt elsewhere, and then nothing was sent. link: null if the session has
// no device memory. In `sequence`: the number of the copier's last message, by whoever spoke to it last.
std::string sendState(Session& session, StateSocket& socket, CopierLink* link, uint32_t& sequence);

uint64_t bootTimeNs();

// Elements of an array, as its copies count them; 0: of a format that cannot be copied here.
size_t arrayElementBytes(const CUDA_ARRAY3D_DESCRIPTOR_v2& shape);
// All of it to host memory, or from it; its context is current.
CUresult copyArray(const Driver& driver, CUarray array, std::span<std::byte> bytes, bool out);
// How much that is; 0: it cannot be copied.
uint64_t arrayBytes(const Driver& driver, CUarray array);
// The level arrays of a mipmapped array, or the array itself.
std::vector<CUarray> levelsOf(const Driver& driver, Objects& objects, uint64_t id, unsigned levels);

// The variable of a module or library in the current context. False: the driver finds none of that name.
bool findVariable(Session& session, uint64_t owner, const std::string& name, CUdeviceptr& address,
                  size_t& bytes);

}  // namespace gpupool::server
