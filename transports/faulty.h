#pragma once
// A transport that goes wrong, for tests: it wraps another one.

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "transports/transport.h"

namespace gpupool::transport {

// All random numbers come from `seed`: the same seed gives the same sequence of faults.
struct Faults {
  uint64_t seed = 1;
  std::chrono::microseconds delay{0};  // one message or transfer in eight is late by up to this
  std::chrono::microseconds stall{0};  // one in 256 holds its caller up for this long
  uint64_t lifetime = 0;   // the peer is lost after so many messages, both directions counted (0: never)
  uint64_t transfers = 0;  // the peer is lost in the middle of this put or get, counted from 1 (0: never)
};
std::unique_ptr<Connection> faulty(std::unique_ptr<Connection> inner, const Faults& faults);

// "seed=7,delay=200us,stall=20ms,lifetime=1000,transfers=3", each of them optional. Throws
// std::runtime_error. connect() wraps its connection in this way if GPUPOOL_FAULTS is set: programs run over
// a bad transport without being changed (tests/networks).
Faults parseFaults(const std::string& text);

}  // namespace gpupool::transport
