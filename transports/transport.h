#pragma once
// The seam between a session and the wire: about a dozen operations and no CUDA.
//
// Contract, the same for every implementation and tested once (tests/contract/):
//  * Messages of one channel arrive once, whole, in order. The channels have separate buffers and credits: a
//    full `call` channel never delays `control`.
//  * A put has landed in the peer's memory before any message committed after it is delivered there.
//  * Every wait ends: with its result, at its deadline, or within 2 s of the peer's death.
//  * What `receive` returns is private memory: the peer cannot change it after it was delivered.
//  * Threads: one producer and one consumer per channel (callers serialise with their own lock); regions and
//    transfers from any thread. Nothing calls back into the user.
//  * Errors after construction are values (nullptr, empty span, Peer), never exceptions; set-up throws
//    std::runtime_error (not a KJ exception) with a message that an operator can act on.
//
// How a connection is made: connect.h. Memory that both sides may touch: shared_memory.h.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "transports/connect.h"
#include "transports/shared_memory.h"

namespace gpupool::transport {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kForever = Deadline::max();

enum class Channel : uint8_t { call, control };  // each exists in both directions
inline constexpr int kChannels = 2;

// closed: the peer ended the connection in order; lost: its process died or the network failed (see
// reason()).
enum class Peer : uint8_t { alive, closed, lost };

// Names memory shared over one connection. The generation makes a stale name an error, never other memory.
// {0, 0} names nothing.
struct Region {
  uint32_t id = 0;
  uint32_t generation = 0;
  bool operator==(const Region&) const = default;
};

// A put or get under way. 0: done already, wait() is true at once. kRefused: out of bounds, a stale or
// unknown name, or the peer is gone; nothing was moved, wait() is false at once.
using Transfer = uint64_t;
inline constexpr Transfer kRefused = ~Transfer{0};

// What puts and gets of a connection have moved, as this side knows: copied by a processor on the way, or
// moved by network cards straight from the source to the destination.
struct Traffic {
  uint64_t copiedBytes = 0;
  uint64_t movedBytes = 0;
};

class Connection {
 public:
  virtual ~Connection() = default;

  // --- messages ---

  // Room for one message of up to `bytes` bytes, at most maxMessage(channel). Blocks while the peer is slow;
  // nullptr at the deadline or when the peer is gone. The pointer is 8-aligned and valid until commit.
  virtual std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) = 0;
  // Sends the reserved message, of which `bytes` (<= reserved) were written. Never blocks.
  virtual void commit(Channel channel, size_t bytes) = 0;
  // The next message, or an empty span at the deadline or when the peer is gone and all it sent was
  // delivered. Valid until the next receive on this channel.
  virtual std::span<const std::byte> receive(Channel channel, Deadline deadline) = 0;
  // receive; `over`: nothing follows, for the peer is gone and all it sent was delivered. peer() behind a
  // wait without a message does not tell that: in between, the message may have come and the peer gone.
  std::span<const std::byte> next(Channel channel, Deadline deadline, bool& over) {
    const bool gone = peer() != Peer::alive;
    const auto message = receive(channel, deadline);
    over = gone && message.empty();
    return message;
  }
  // True if receive would return at once.
  virtual bool pending(Channel channel) = 0;
  virtual size_t maxMessage(Channel channel) const = 0;  // a little less than half of its buffer
  size_t maxMessage() const {                            // for either channel
    return std::min(maxMessage(Channel::call), maxMessage(Channel::control));
  }

  // --- regions ---

  // Lets the peer map, put to and get from `memory`. Kept alive until unshare or close, and while a transfer
  // of the peer's touches it.
  virtual Region share(std::shared_ptr<SharedMemory> memory) = 0;
  virtual void unshare(Region region) = 0;
  // The peer's region in this process, at `fixedAddress` if given; null where mapsMemory() is false. Waits
  // for the region to be announced, until the deadline. A part of a file (SharedMemory::ofFile) is mapped at
  // a fixed address only, and is null where the file has changed meanwhile.
  virtual std::shared_ptr<SharedMemory> map(Region remote, void* fixedAddress, Deadline deadline) = 0;
  // Its bytes, announced by the deadline; 0: there is no such region.
  virtual size_t sizeOf(Region, Deadline) { return 0; }
  // True if map can succeed: client and worker are on one host.
  virtual bool mapsMemory() const = 0;
  // Copies to or from the peer's region; bounds are checked here against its announced size (kRefused and
  // peer() unchanged: a caller's error). `local` stays valid until the transfer is done or the connection is
  // closed.
  virtual Transfer put(const void* local, Region remote, uint64_t offset, size_t bytes) = 0;
  virtual Transfer get(void* local, Region remote, uint64_t offset, size_t bytes) = 0;
  // True once the transfer has completed at its destination; false at the deadline or when the peer is gone.
  virtual bool wait(Transfer transfer, Deadline deadline) = 0;

  // --- the peer ---
  virtual Peer peer() const = 0;
  virtual std::string reason() const = 0;  // why peer() is not alive, as a message for users
  // That is what the peer, or its server, has said. Else it is what this side has seen.
  virtual bool saidReason() const { return false; }
  // Options::stallTimeout from here on. Transports within one host keep what they began with.
  virtual void setStallTimeout(std::chrono::milliseconds) {}
  // A descriptor that becomes readable when the peer closes the connection or dies (poll it together with
  // others). Owned by the connection.
  virtual int wakeupDescriptor() const = 0;
  // Sends what was committed (within a bound if the peer is slow), ends the connection in order and wakes
  // every waiter of this side; peer() is `closed` from then on. Idempotent.
  virtual void close() = 0;
  // In a forked child, before any other call there: drops everything; the peer notices nothing.
  virtual void abandon() = 0;
  virtual const char* name() const = 0;           // its own, in the table of base/transport_names.h
  virtual Traffic traffic() const { return {}; }  // counted by networks only
};

// Lets the peer put to and get from the caller's own memory while this object lives; region() is {0, 0} if
// the memory cannot be shared. The destructor waits for transfers under way: nothing touches the memory after
// it.
class Lent {
 public:
  Lent(Connection& connection, void* data, size_t bytes);
  ~Lent();
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  Region region() const { return region_; }

 private:
  Connection& connection_;
  std::weak_ptr<SharedMemory> memory_;
  Region region_;
};

}  // namespace gpupool::transport
