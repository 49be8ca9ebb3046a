#pragma once
// One simulated holder: what it asks for, and the lease that it has; or a job scheduler, with the programs
// that use its claim. Times are milliseconds of the simulated world.

#include <array>
#include <cstdint>
#include <string>

#include "pool-manager/model.h"

namespace gpupool::history {

using namespace gpupool::pool;

// One that uses a claim for a while, and perhaps again.
struct Program {
  enum class Is { away, asking, using_ } is = Is::away;
  Id adopter;
  uint64_t nextAt = 0, askAt = 0, renewAt = 0, untilAt = 0;
  uint64_t heardAt = 0;  // when the manager was told the last time
  bool dies = false;
};

struct Holder {
  enum class Is { idle, asking, holding, done } is = Is::idle;
  Id id;
  uint64_t nextAt = 0, askAt = 0, renewAt = 0, untilAt = 0, stalledUntil = 0, healthySince = 0,
           managerRan = 0;
  bool dies = false, dead = false;
  uint64_t memory = 0;
  uint32_t devices = 1, waitMs = 0;
  TurnTerms terms = {};
  std::string key;
  std::string gpu = {}, tenant = {};
  Policy policy = Policy::pack;
  uint64_t limitMs = 0;
  std::string job = {};  // it is a scheduler, and the lease a claim, which these use
  std::array<Program, 2> programs = {};
};

}  // namespace gpupool::history
