#pragma once
// The seam between a session and the wire: about a dozen operations and no CUDA.
//
// A connection is made over a *bootstrap socket*: a connected stream socket (Unix or TCP) between client and
// worker that the server handed over. Each transport exchanges over it what it needs (memory descriptors, a
// listener's port) and keeps it: end-of-file on it is how the death of the peer is seen at once.
//
// Contract, the same for every implementation and tested once (tests/contract/):
//  * Messages of one channel arrive once, whole, in order. The channels have separate buffers and credits: a
//  full
//    `call` channel never delays `control`.
//  * A put has landed in the peer's memory before any message committed after it is delivered there.
//  * Every wait ends: with its result, at its deadline, or within 2 s of the peer's death.
//  * What `receive` returns is private memory: the peer cannot change it after it was delivered.
//  * Threads: one producer and one consumer per channel (callers serialise with their own lock); regions and
//    transfers from any thread. Nothing calls back into the user.
//  * Errors after construction are values (nullptr, empty span, Peer), never exceptions; set-up throws
//    kj-free std::runtime_error with a message an operator can act on.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace gpupool::transport {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kForever = Deadline::max();

enum class Channel : uint8_t { call, control };  // each exists in both directions
inline constexpr int kChannels = 2;

// alive; closed: the peer said goodbye; lost: it died, or the wire did (reason() says which).
enum class Peer : uint8_t { alive, closed, lost };

// Names memory shared over one connection. The generation makes a stale name an error, never other memory.
// {0, 0} names nothing.
struct Region {
  uint32_t id = 0;
  uint32_t generation = 0;
  bool operator==(const Region&) const = default;
};

// This machine, or a limit of this process, has no room for shared memory.
struct ShortOfMemory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Memory that can be shared with the peer. Where both are on one host it is a memfd, sealed against resizing.
// Owns the mapping and the descriptor; unmapped on destruction, so it outlives its use by any device.
class SharedMemory {
 public:
  // Maps `bytes` (rounded up to pages) of zeroed memory, at `fixedAddress` if given (it must be free or
  // reserved by the caller: the mapping replaces it). Throws ShortOfMemory, or another std::runtime_error.
  static std::shared_ptr<SharedMemory> create(size_t bytes, void* fixedAddress = nullptr);
  // The same memory, from a received descriptor; checks size and seals before it maps.
  static std::shared_ptr<SharedMemory> adopt(int descriptor, size_t bytes, void* fixedAddress = nullptr);
  // Memory of the caller's own, which can be shared only where mapsMemory() is false (see Lent).
  static std::shared_ptr<SharedMemory> borrow(void* data, size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  int descriptor() const { return descriptor_; }

 private:
  SharedMemory(std::byte* data, size_t size, int descriptor, bool restoreReservation);
  std::byte* data_;
  size_t size_;
  int descriptor_;
  bool restoreReservation_;  // fixed address: leave PROT_NONE behind instead of a hole
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

  // Room for  // one message of up to `bytes` bytes, at most maxMessage(channel). Blocks while the peer is
  // slow; nullptr at the deadline or when the peer is gone. The pointer is 8-aligned and valid until commit.
  virtual std::byte* reserve(Channel channel, size_t bytes, Deadline deadline) = 0;
  // Sends the reserved message, of which `bytes` (<= reserved) were written. Never blocks.
  virtual void commit(Channel channel, size_t bytes) = 0;
  // The next message, or an empty span at the deadline or when the peer is gone and all it sent was
  // delivered. Valid until the next receive on this channel.
  virtual std::span<const std::byte> receive(Channel channel, Deadline deadline) = 0;
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
  // The peer's region in this process, at `fixedAddress` if given; null where this transport cannot give one
  // (a network). Waits for the region to be announced, until the deadline.
  virtual std::shared_ptr<SharedMemory> map(Region remote, void* fixedAddress, Deadline deadline) = 0;
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
  virtual std::string reason() const = 0;  // why peer() is not alive, for people
  // Readable when the peer goes away (poll it together with other descriptors). Owned by the connection.
  virtual int wakeupDescriptor() const = 0;
  // Sends what was committed (bounded where the peer is slow), says goodbye and wakes every waiter of this
  // side; peer() is `closed` from then on. Idempotent.
  virtual void close() = 0;
  // In a forked child, before any other call there: drops everything without a word to the peer.
  virtual void abandon() = 0;
  virtual const char* name() const = 0;           // "shm", "ucx", "loopback"
  virtual Traffic traffic() const { return {}; }  // of ucx; others do not count
};

// The caller's own memory within reach of the peer's puts and gets, for as long as this lives; region() is
// {0, 0} where it cannot be shared. The end waits for transfers under way: nothing touches the memory after
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

// What ucx goes over: RDMA where both ends have a device on the way, else TCP; or one of them only.
enum class NetworkWire : uint8_t { automatic, tcp, rdma };
// "auto", "tcp" or "rdma"; throws std::runtime_error for another name.
NetworkWire wireNamed(const std::string& name);

struct Options {
  size_t callBytes = size_t{4} << 20;  // buffer of the call channel, each direction
  size_t controlBytes = size_t{256} << 10;
  // ucx: UCX_NET_DEVICES ("lo", "eth0", "mlx5_0:1"); empty: the bootstrap socket's interface.
  std::string networkDevice;
  // ucx: UCX_TLS in the environment wins. The worker offers a wire, the client takes it or both take TCP.
  NetworkWire wire = NetworkWire::automatic;
  // ucx: address the worker's listener binds; empty: the bootstrap socket's own.
  std::string bindAddress;
  std::chrono::milliseconds setupTimeout{10000};
  // ucx: a peer whose host no longer answers is lost after this.
  std::chrono::milliseconds peerTimeout{2000};
  // ucx: a peer that is there but does nothing (stopped, in a debugger, starved) is lost after this.
  std::chrono::milliseconds stallTimeout{30000};
};

// Both sides call the one that fits, on the two ends of the bootstrap socket; takes ownership of the
// descriptor. accept: the worker, which creates all shared memory. connect: the client.
std::unique_ptr<Connection> acceptShm(int bootstrap, const Options& options);
std::unique_ptr<Connection> connectShm(int bootstrap, const Options& options);
std::unique_ptr<Connection> acceptUcx(int bootstrap, const Options& options);
std::unique_ptr<Connection> connectUcx(int bootstrap, const Options& options);
// "shm" or "ucx"; throws std::runtime_error for another name.
std::unique_ptr<Connection> accept(const std::string& transport, int bootstrap, const Options& options);
std::unique_ptr<Connection> connect(const std::string& transport, int bootstrap, const Options& options);

// Two connected ends in this process: {client, worker}.
std::pair<std::unique_ptr<Connection>, std::unique_ptr<Connection>> loopbackPair(const Options& options);

// Wraps another connection for tests. What is drawn is drawn from `seed`: the same seed gives the same
// sequence.
struct Faults {
  uint64_t seed = 1;
  std::chrono::microseconds delay{0};  // one message or transfer in eight is late by up to this
  std::chrono::microseconds stall{0};  // one in 256 holds its caller up for this long
  uint64_t lifetime = 0;   // the peer is lost after so many messages, both directions counted (0: never)
  uint64_t transfers = 0;  // the peer is lost in the middle of this put or get, counted from 1 (0: never)
};
std::unique_ptr<Connection> faulty(std::unique_ptr<Connection> inner, const Faults& faults);
// "seed=7,delay=200us,stall=20ms,lifetime=1000,transfers=3", each of them optional. Throws
// std::runtime_error. connect() wraps what it makes so when the environment has GPUPOOL_FAULTS: programs run
// over a bad transport without being changed (tests/networks).
Faults parseFaults(const std::string& text);

}  // namespace gpupool::transport
