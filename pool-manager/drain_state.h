#pragma once
// How it is with a server that is being emptied (schema::DrainState), as a plain struct.

#include <cstdint>
#include <string>
#include <vector>

#include "schema/id.h"
#include "schema/pool.capnp.h"

namespace gpupool::pool {

// As in pool.capnp.
struct DrainedLease {
  Id id;
  std::string state;
  bool leaves = false;
  std::string note;
};
struct DrainWord {
  uint64_t number = 0;
  Id lease;
  bool moved = false;
  std::string text;
};
struct DrainState {
  bool cordoned = false, moving = false, goesOn = false;
  std::vector<DrainedLease> leases;
  std::vector<DrainWord> words;
  uint64_t latest = 0;
};

DrainState read(schema::DrainState::Reader from);
void write(const DrainState& from, schema::DrainState::Builder to);

}  // namespace gpupool::pool
