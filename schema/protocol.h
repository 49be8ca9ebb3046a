#pragma once
// The version of schema/pool.capnp that this program speaks.

#include <cstdint>

namespace gpupool::schema {

// Out of line: tests link programs of "another version".
uint32_t poolProtocol();

}  // namespace gpupool::schema
