#include "schema/protocol.h"

#include "schema/pool.capnp.h"

namespace gpupool::schema {

uint32_t poolProtocol() { return PROTOCOL_VERSION; }

}  // namespace gpupool::schema
