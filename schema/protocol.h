#pragma once
// The versions of schema/pool.capnp that a program speaks (that file says what raises them), and which one a
// connection has.

#include <algorithm>
#include <cstdint>
#include <string>

namespace gpupool::schema {

// Out of line: tests link programs of "another version".
uint32_t poolProtocol();
uint32_t oldestPoolProtocol();
// Of gpupool, for people: "0.1.0".
const char* release();

struct ProtocolRange {
  uint32_t latest = 0, oldest = 0;
};
inline ProtocolRange ownProtocols() { return {poolProtocol(), oldestPoolProtocol()}; }
// As a peer says it. Peers of before version 9, and those that claim nonsense, speak one.
inline ProtocolRange saidProtocols(uint32_t protocol, uint32_t oldest) {
  return {protocol, oldest == 0 || oldest > protocol ? protocol : oldest};
}
// 0: none.
inline uint32_t commonProtocol(const ProtocolRange& ours, const ProtocolRange& theirs) {
  const uint32_t common = std::min(ours.latest, theirs.latest);
  return common >= std::max(ours.oldest, theirs.oldest) ? common : 0;
}

// Two that have none in common: what each speaks, and which is to be upgraded first. Sides are named as in
// "the pool's manager".
std::string protocolMismatch(const std::string& side, const ProtocolRange& its, const std::string& other,
                             const ProtocolRange& others);

}  // namespace gpupool::schema
