#pragma once
// Bounds in tests say how soon the product does something. On a machine where more threads want to run than
// there are cores, everything takes longer, and no test shall fail for that: CHECK(took < 2s * test::busy()).

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

namespace gpupool::test {

// How many threads want each core, of late and now; 1 on an idle machine.
inline int busy() {
  double late = 0, skipped;
  int running = 0;
  std::ifstream("/proc/loadavg") >> late >> skipped >> skipped >> running;
  const double cores = std::max(1.0, static_cast<double>(sysconf(_SC_NPROCESSORS_ONLN)));
  return std::max(1, static_cast<int>(std::ceil(std::max(late, running - 1.0) / cores)));
}

}  // namespace gpupool::test
