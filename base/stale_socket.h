#pragma once
// Room for a Unix socket to listen on. A process that was killed leaves its socket in the folder, and nobody
// can bind there again; one that runs must not lose its own.

#include <string>

namespace gpupool {

// Removes the socket at this path if nobody answers on it. Throws std::runtime_error where somebody does
// (who: "another server"), and where the path is something else than a socket. Blocks for 1.6 s at most.
void removeStaleSocket(const std::string& path, const std::string& who);

}  // namespace gpupool
