#pragma once
// The bytes of a session's device memory on the state socket: all pieces, in the order of Space::takeStock,
// as one run of bytes in parts (StateSocket). Two buffers of host memory take turns, so that one is on the
// wire while the other one is copied and its checksum made; nothing else is held. Parts that come through
// shared memory are copied to the device from there. Everything stands still. Where there are n connections
// (parallel_sockets.h) each carries every n-th part, and each part comes behind its number (8 bytes).
//
// Belongs to one thread, which has the same context current before and behind it.

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "server/worker/device_pieces.h"
#include "server/worker/parallel_sockets.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

class DeviceStream {
 public:
  // Behind takeStock, or adopt and comeBack. The stream of one of `shares` connections: it carries the parts
  // whose number modulo `shares` is `share`.
  explicit DeviceStream(Session& session, DevicePieces::List pieces = nullptr, size_t share = 0,
                        size_t shares = 1)
      : session_(session), pieces_(session, std::move(pieces)), share_(share), shares_(shares) {}
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // "" or why not, for people. One of the three, once.
  std::string send(StateSocket& socket);
  std::string receive(StateSocket& socket);
  // Sends nothing: the checksums of the parts that would be sent.
  std::string read(std::vector<Checksum>& checksums);

 private:
  struct Range {  // of one piece
    size_t piece = 0;
    uint64_t offset = 0, bytes = 0;
  };
  struct Part {
    uint64_t number = 0;
    std::vector<Range> ranges;
    std::span<std::byte> bytes;
    Checksum checksum{};
  };
  // memory: null: makes some.
  std::string prepare(std::shared_ptr<transport::SharedMemory> memory = nullptr);
  // What comes next, in that buffer; without ranges behind the last piece. cutAny: of all shares.
  Part cut(size_t buffer);
  Part cutAny(size_t buffer);
  std::string fill(Part& part);  // from the device
  std::string copy(const Part& part, std::byte* at, bool out);
  // The part's number, where there are several connections. False: the socket's error, as when another part
  // comes.
  bool sayNumber(StateSocket& socket, const Part& part) const;
  bool hearNumber(StateSocket& socket, const Part& part) const;

  Session& session_;
  DevicePieces pieces_;
  const size_t share_, shares_;
  uint64_t number_ = 0;  // of the next part
  size_t piece_ = 0;     // where it begins
  uint64_t offset_ = 0;
  std::shared_ptr<transport::SharedMemory> buffers_;  // registered with the driver
};

// All of it, over these connections. "" or why not; see ParallelSockets::together.
std::string sendDevices(Session& session, StateSocket& socket, ParallelSockets& parallel);
std::string receiveDevices(Session& session, StateSocket& socket, ParallelSockets& parallel);

}  // namespace gpupool::server
