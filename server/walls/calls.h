#pragma once
// The wall around system calls, by seccomp: a list of what workers and drivers are known to call. What is not
// on it fails with ENOSYS, as in an older kernel, so that a driver goes on without it; what is on it, but not
// with these arguments, with EPERM.

#include <functional>
#include <string>

namespace gpupool::server::walls {

// The kernel has seccomp's filters.
bool hasSeccomp();

// Of a process with one thread and no_new_privs. Throws std::runtime_error.
void permitCalls(bool network);

// The same list, which lets everything pass: `seen` is called on a thread of its own with each call that is
// not on it ("mount", "kill(1234, 0x9)") and, as "open PATH", with each absolute path that is opened.
void watchCalls(bool network, std::function<void(const std::string& call)> seen);

// Of all threads, besides the list. Throws std::runtime_error.
void refuseNetwork();
void refuseLocalSockets();  // AF_UNIX

}  // namespace gpupool::server::walls
