#pragma once
// Text written whole to a descriptor that is somebody else's: the application's stdout, a terminal, a pipe.

#include <chrono>
#include <string_view>

namespace gpupool {

// Goes on after a signal that interrupts the write, and where the descriptor does not block and is full waits
// until there is room again. False: the descriptor took nothing for `bound` (non-blocking ones only) or
// failed; the rest is lost.
bool writeAll(int descriptor, std::string_view text,
              std::chrono::milliseconds bound = std::chrono::seconds(10));

}  // namespace gpupool
