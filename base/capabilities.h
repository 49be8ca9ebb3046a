#pragma once
// What a process may do beyond its user (capabilities(7)).

#include <linux/capability.h>

#include <sys/types.h>

#include <span>
#include <vector>

namespace gpupool {

// The calling thread keeps these and no others, and what it executes can get no others: the ambient set is
// emptied, and the bounding set as far as the thread may. Call it while the process has one thread. Makes
// system calls only, so that a child may call it after fork. False, and errno: the kernel refuses, for
// example because the thread lacks one.
bool keepCapabilities(std::span<const int> kept);

// The process's supplementary groups. Throws std::system_error.
std::vector<gid_t> supplementaryGroups();

}  // namespace gpupool
