#pragma once
// Between inventory.capnp and the plain structs that manager, server and worker share. read() checks nothing
// but shape.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "schema/device.h"
#include "schema/id.h"
#include "schema/inventory.capnp.h"

namespace gpupool::schema {

inline std::string text(capnp::Text::Reader from) { return {from.begin(), from.size()}; }
inline std::string bytes(capnp::Data::Reader from) {
  return {reinterpret_cast<const char*>(from.begin()), from.size()};
}
inline capnp::Data::Reader data(const std::string& from) {
  return {reinterpret_cast<const unsigned char*>(from.data()), from.size()};
}

Id read(Id128::Reader from);
gpupool::Device read(DeviceInfo::Reader from);
gpupool::LeasedDevice read(LeasedDevice::Reader from);

void write(const Id& from, Id128::Builder to);
void write(const gpupool::Device& from, DeviceInfo::Builder to);
void write(const gpupool::LeasedDevice& from, LeasedDevice::Builder to);
// As many as `to` has room for: it was made for them.
void write(std::span<const std::string> from, capnp::List<capnp::Text>::Builder to);
// `kept` of whichever struct has it: bytes, one value for each device of a lease.
template <class Builder>
void writeKept(const std::vector<uint64_t>& from, Builder to) {
  auto kept = to.initKept(static_cast<unsigned>(from.size()));
  for (unsigned i = 0; i < kept.size(); ++i) kept.set(i, from[i]);
}

}  // namespace gpupool::schema
