#pragma once
// The shell of a worker process: what it exchanges with the server that started it.
//
//   Server and worker share a SOCK_SEQPACKET pair, the worker's end is descriptor 3. Worker -> server:
//   WorkerReport; server -> worker: WorkerStart with the client's socket (SCM_RIGHTS), later perhaps
//   WorkerStart.stop. One datagram is one flat Cap'n Proto message of at most kMaxDatagram bytes. A worker
//   serves one session and exits.
//
// A worker's main, in order: parseWorkerArguments; with --inventory runInventory and exit; WorkerProcess;
// Driver::load and warmUp, where they throw reportFailed and exit; reportReady; waitForSession; watchServer;
// the session; reportEnded; exit.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

struct CUctx_st;  // *CUcontext: the server includes this without CUDA

namespace gpupool::server {

class Driver;

inline constexpr int kControlDescriptor = 3;
inline constexpr size_t kMaxDatagram = size_t{64} << 10;

struct WorkerArguments {
  bool inventory = false;  // --inventory: report the devices and exit
  bool help = false;       // --help
  std::string driver;      // --driver PATH; empty: searched for
  int warmDevice =
      -1;  // --warm-context ORDINAL: retain that device's primary context ahead of time; -1: none
  std::chrono::milliseconds clientStallTime{
      0};  // --client-stall-time MS: server/front/options.h; 0: for ever
};
// Throws std::runtime_error naming the argument it does not know.
WorkerArguments parseWorkerArguments(int count, char** words);
extern const char kWorkerUsage[];

struct DeviceDescription {
  std::vector<uint8_t> uuid;  // 16 bytes
  std::string name;
  uint64_t memoryBytes = 0;
  uint32_t computeMajor = 0, computeMinor = 0;
  std::string pciBusId;
  uint32_t ordinal = 0;
  bool software = false;
  uint32_t driverVersion = 0;
};

// All devices of the driver, after cuInit. Throws std::runtime_error.
std::vector<DeviceDescription> listDevices(const Driver& driver);
// `--inventory`: reports to the server if the control descriptor is a socket, else prints to stdout. The exit
// status.
int runInventory(const std::string& driverPath, uint64_t rowsHash);

// Reserves the arena of module globals, then cuInit, and the primary context of `device` unless that is -1
// (one worker a device can afford one: 527 MiB), which it returns then. Throws.
CUctx_st* warmUp(const Driver& driver, int device = -1);

struct SessionStart {
  struct Device {
    DeviceDescription info;    // info.ordinal: the driver's
    uint64_t memoryBytes = 0;  // the lease's limit on it
  };
  uint64_t sessionHigh = 0, sessionLow = 0;
  uint64_t epoch = 0;
  std::string transport;  // "shm" or "ucx"
  std::vector<Device> devices;
  std::string networkDevice;
  std::string networkWire;
  std::string moduleCache;  // folder; empty: none
  uint64_t moduleCacheBytes = 0;
  uint32_t clientPid = 0;
  int socket = -1;  // the client's bootstrap socket, blocking and close-on-exec; the receiver's to close
};

// Reports are sent by any thread; everything else belongs to the thread that constructed it.
class WorkerProcess {
 public:
  // Takes over the descriptor and keeps it from children. Throws std::runtime_error if it is no such socket.
  explicit WorkerProcess(int descriptor = kControlDescriptor, uint64_t rowsHash = 0);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  // Each returns false if the server is gone.
  bool reportReady(const std::string& driverPath = {});
  bool reportDevices(const std::string& driverPath, std::span<const DeviceDescription> devices);
  bool reportFailed(const std::string& text);
  // The session is over, for people: "client closed", "client lost: ..." From here the server waits a bounded
  // time for the process to exit, then kills it.
  bool reportEnded(const std::string& text);

  // A device of the session, named by the driver's ordinal, broke: the server places nothing on it any more.
  bool reportLost(uint32_t ordinal, const std::string& error);

  // Waits, without bound, for the one session. Empty: the server is gone or told the worker to stop; exit
  // then. Throws std::runtime_error for a malformed start.
  std::optional<SessionStart> waitForSession();

  static constexpr std::chrono::milliseconds kGrace{1500};

  // From now on a thread watches the server and SIGTERM. When the server dies or orders a stop, it calls
  // `stop(reason)` once, on that thread; the session should then end (tell the client, close its connection).
  // If the process still lives `grace` later it is ended with _exit(kExitStopped); likewise if it does
  // `grace` after `clientGone` (-1: none) became readable: a driver that does not come back must not keep the
  // device. Call once, after waitForSession.
  void watchServer(std::function<void(const std::string& reason)> stop,
                   std::chrono::milliseconds grace = kGrace, int clientGone = -1);
  bool stopping() const { return stopping_.load(std::memory_order_acquire); }

  static constexpr int kExitStopped = 75;

 private:
  void watch(const std::function<void(const std::string&)>& stop, std::chrono::milliseconds grace,
             int clientGone);
  bool endsWithin(std::chrono::milliseconds time) const;

  int descriptor_;
  int done_ = -1;  // eventfd: ends the watcher
  uint64_t rowsHash_;
  std::atomic<bool> stopping_{false};
  std::thread watcher_;
};

}  // namespace gpupool::server
