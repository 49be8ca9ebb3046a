#pragma once
// Records on the bootstrap socket of shm: fixed size, each with at most one descriptor. The socket is a
// stream, so a record may arrive in pieces; its descriptor travels with the first byte (unix(7), SCM_RIGHTS).

#include <sys/socket.h>
#include <sys/types.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>

#include "transports/descriptor.h"
#include "transports/transport.h"
#include "transports/waiting.h"

namespace gpupool::transport {

enum class RecordKind : uint32_t {
  hello = 0x6770'0001,  // both ways; from the worker with the rings' descriptor
  region,               // size, with a descriptor
  withdraw,
  goodbye,
  lastWords,  // from the server, about a worker that is gone: `size` bytes of text follow (last_words.h)
  file,       // a region of a file: size and, as `extra`, offset, with a descriptor
};

struct Record {
  RecordKind kind{};
  uint32_t id = 0;          // hello: protocol version
  uint32_t generation = 0;  // hello: 1 if the sender takes part in the expedited barrier
  uint32_t pid = 0;         // of the sender; receivers use the kernel's report (SCM_CREDENTIALS), not this
  uint64_t size = 0;        // hello: bytes of a call ring
  uint64_t extra = 0;       // hello: bytes of a control ring; file: offset
};
static_assert(sizeof(Record) == 32);

class RemoteRegions;

// Handles a record about regions. False: it is not about regions, or is malformed (protocol violation).
bool applyRecord(RemoteRegions& regions, const Record& record, Descriptor attached);

class Bootstrap {
 public:
  // Takes the connected Unix stream socket. Throws std::runtime_error if it is something else.
  explicit Bootstrap(int socket);

  int descriptor() const { return socket_.get(); }
  void abandon() { socket_.reset(); }

  // Any thread. False when the time is over or when the socket failed. `attached` is borrowed, -1: none.
  bool send(const Record& record, int attached, TimeLeft time);

  enum class Got { record, nothing, end };
  // One thread. Reads what is there without blocking; `record` and `attached` are set on Got::record.
  Got poll(Record& record, Descriptor& attached);
  // The same, waiting. False when the time is over or the end.
  bool receive(Record& record, Descriptor& attached, TimeLeft time);

  // What is there behind a record, as it is.
  size_t read(std::span<std::byte> bytes);

  // The process that sent the last record, as reported by the kernel; 0: unknown.
  pid_t peerProcess() const { return peerProcess_; }

 private:
  Descriptor socket_;
  std::mutex sendMutex_;
  std::array<std::byte, sizeof(Record)> partial_{};
  size_t have_ = 0;
  Descriptor attached_;
  pid_t peerProcess_ = 0;
};

}  // namespace gpupool::transport
