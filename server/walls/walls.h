#pragma once
// The walls around a worker. A worker runs tenants' code by way of a driver, and may be taken over by it:
// what it can then reach is what the kernel still lets this process do.
//
//   no_new_privs   no setuid program gives it rights
//   capabilities   none, not even of root
//   undumpable     no other process looks into it, and it leaves no core
//   limits         on descriptors; no core files, no message queues
//   devices        a /dev with the nodes of its own GPUs, and no others (devices.h)
//   landlock       files: the driver, the system's libraries, devices, /proc/self and the cache of modules;
//                  by a newer kernel (6.12) also no signals to others and no abstract sockets
//   seccomp        the calls that worker and driver make; no other program, no child process, no signal to
//                  others, nothing of other processes' memory; no network unless the session comes from there
//   user           a user id that no other process has: gpupool-spawner gives it (--worker-users)
//
// The others are put up by the worker itself, before it loads the driver and before it has a second thread:
// what runs until then is gpupool's own. None can be taken down again. The server asks the kernel which can
// stand here (ofThisMachine), and uses no worker that reports fewer.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/spawner/user_range.h"
#include "server/walls/devices.h"

namespace gpupool::server::walls {

enum class Mode : uint8_t {
  off,
  automatic,  // those that this kernel has
  required,   // all of them
  log,        // landlock and seccomp let everything pass, and what they would refuse is logged
};
std::optional<Mode> modeNamed(std::string_view name);  // "off", "auto", "required", "log"
std::string nameOf(Mode mode);

struct Plan {
  Mode mode = Mode::off;
  bool network = false;     // until closeNetwork the process may use the network
  std::string driver;       // a library: what lies beside it may be read
  std::string moduleCache;  // a folder in which files, not folders, may be read, made and removed, but not
                            // listed; empty: none
  std::optional<Devices> devices;  // none: the process keeps the machine's /dev
};

struct State {
  std::vector<std::string> standing;  // names
  std::vector<std::string> missing;   // "landlock: why"
};

// What `raise` would put up here, with Plan.devices. Asks the kernel, and changes nothing. user: as which one
// the workers run, if that is another one than the caller's.
State ofThisMachine(Mode mode, uid_t user = 0);

// Of a process with one thread. Throws std::runtime_error where something fails that ofThisMachine promises
// (for devices: the plan), or is required.
State raise(const Plan& plan);

// The name of the wall that ofThisMachine and raise know nothing of, and whether it stands around this
// process.
inline constexpr char kOwnUser[] = "user";
bool hasOwnUser(const UserRange& users);

// No new local sockets, of any thread, from now on: the driver is initialized, and has the only one that it
// needs. Nothing where seccomp does not stand. Throws std::runtime_error.
void closeLocal();

// No new connections, of any thread, from now on; what the process has stays. Nothing where seccomp does not
// stand. Throws std::runtime_error.
void closeNetwork();

}  // namespace gpupool::server::walls
