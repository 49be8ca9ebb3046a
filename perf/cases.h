#pragma once
// What is measured. A case is known by name without a GPU; its steps are made when its turn comes. One sample
// is the time of `operations` calls of `body` (with `after`, where that is said) divided by their number.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "perf/gpu.h"

namespace gpupool::perf {

struct Steps {
  std::function<void()> before, body, after;  // before and after may be empty
};

struct Case {
  std::string name;
  std::function<Steps(Gpu&)> make;
  unsigned operations = 1;
  uint64_t bytes = 0;       // that one operation moves
  bool once = false;        // one sample, the very first call; nothing warms it up
  bool timesAfter = false;  // `after` belongs to the sample
};

void addAllocationCases(std::vector<Case>& cases, size_t largest);
void addLaunchCases(std::vector<Case>& cases);
void addEventCases(std::vector<Case>& cases);
void addGraphCases(std::vector<Case>& cases);
void addCopyCases(std::vector<Case>& cases, size_t largest, bool quick);
// sgemm and fft2, if NVIDIA's libraries are there; otherwise their steps throw std::runtime_error with the
// reason.
void addLibraryCases(std::vector<Case>& cases);
// Those that make everything after them slower.
void addLastCases(std::vector<Case>& cases);

std::string sizeName(size_t bytes);  // 4B, 4KiB, 1MiB, 1GiB

}  // namespace gpupool::perf
