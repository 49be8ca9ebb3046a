#pragma once
// Why the pool does not do what it was asked for.

#include <string>

namespace gpupool::pool {

// Refused for a reason that time may cure (nothing free, a server that went away), because the pool has
// nothing of the kind, or no worker program for such a client, or for good.
struct Failure {
  enum class Kind { noDevice, nothingFits, otherVersion, serverLost, refused } kind = Kind::refused;
  std::string text;
};

}  // namespace gpupool::pool
