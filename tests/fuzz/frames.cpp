// A session's messages as they come: the greeting, then frames and notices, headers and all.
//
// Input: u8 bit 0: over a network; then messages {u8 channel, u16 length, bytes}; the first of channel 0 is
// the greeting.
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/bench.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool::fuzz;
  Input input(data, size);
  Bench bench((input.value<uint8_t>() & 1) != 0, size);
  bool greeted = false;
  while (!input.empty()) {
    const bool control = (input.value<uint8_t>() & 1) != 0;
    // A copy of its own length: what is read beyond it is seen.
    auto bytes = input.blob();
    std::vector<std::byte> message(bytes.begin(), bytes.end());
    if (control) {
      if (greeted && !bench.control(message)) break;
    } else if (!greeted) {
      if (!bench.greet(message)) break;
      greeted = true;
      bench.mintObjects();
    } else if (!bench.frame(message)) {
      break;
    }
  }
  return 0;
}
