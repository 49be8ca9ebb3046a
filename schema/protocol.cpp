#include "schema/protocol.h"

#include "schema/pool.capnp.h"

namespace gpupool::schema {
namespace {

std::string spoken(const ProtocolRange& range) {
  const std::string latest = std::to_string(range.latest);
  return range.oldest == range.latest ? latest : std::to_string(range.oldest) + " to " + latest;
}

}  // namespace

uint32_t poolProtocol() { return PROTOCOL_VERSION; }
uint32_t oldestPoolProtocol() { return OLDEST_PROTOCOL; }
const char* release() { return GPUPOOL_RELEASE; }

std::string protocolMismatch(const std::string& side, const ProtocolRange& its, const std::string& other,
                             const ProtocolRange& others) {
  return "version mismatch: " + side + " speaks pool protocol " + spoken(its) + ", " + other + " speaks " +
         spoken(others) + "; upgrade " + (its.latest < others.latest ? side : other) + " first";
}

}  // namespace gpupool::schema
