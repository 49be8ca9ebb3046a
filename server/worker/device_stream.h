#pragma once
// The bytes of a session's device memory on the state socket: all pieces, in the order of Space::takeStock,
// as one run of bytes in parts (StateSocket). Two buffers of host memory take turns, so that one is on the
// wire while the other one is copied and its checksum made; nothing else is held. Parts that come through
// shared memory are copied to the device from there. Everything stands still.
//
// Belongs to one thread, which has the same context current before and behind it.

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "server/worker/device_pieces.h"
#include "server/worker/state_socket.h"

namespace gpupool::server {

class DeviceStream {
 public:
  // Behind takeStock, or adopt and comeBack.
  explicit DeviceStream(Session& session) : session_(session), pieces_(session) {}
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
    std::vector<Range> ranges;
    std::span<std::byte> bytes;
    Checksum checksum{};
  };
  // memory: null: makes some.
  std::string prepare(std::shared_ptr<transport::SharedMemory> memory = nullptr);
  // What comes next, in that buffer; without ranges behind the last piece.
  Part cut(size_t buffer);
  std::string fill(Part& part);  // from the device
  std::string copy(const Part& part, std::byte* at, bool out);

  Session& session_;
  DevicePieces pieces_;
  size_t piece_ = 0;  // where the next part begins
  uint64_t offset_ = 0;
  std::shared_ptr<transport::SharedMemory> buffers_;  // registered with the driver
};

}  // namespace gpupool::server
