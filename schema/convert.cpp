#include "schema/convert.h"

namespace gpupool::schema {

Id read(Id128::Reader from) { return {from.getHigh(), from.getLow()}; }

gpupool::Device read(DeviceInfo::Reader from) {
  return {bytes(from.getUuid()),   text(from.getName()),     from.getMemoryBytes(), from.getComputeMajor(),
          from.getComputeMinor(),  text(from.getPciBusId()), from.getOrdinal(),     from.getSoftware(),
          from.getDriverVersion(), text(from.getProblem())};
}

gpupool::LeasedDevice read(LeasedDevice::Reader from) {
  return {read(from.getInfo()), from.getMemoryBytes()};
}

void write(const Id& from, Id128::Builder to) {
  to.setHigh(from.high);
  to.setLow(from.low);
}

void write(const gpupool::Device& from, DeviceInfo::Builder to) {
  to.setUuid(data(from.uuid));
  to.setName(from.name);
  to.setMemoryBytes(from.memoryBytes);
  to.setComputeMajor(from.computeMajor);
  to.setComputeMinor(from.computeMinor);
  to.setPciBusId(from.pciBusId);
  to.setOrdinal(from.ordinal);
  to.setSoftware(from.software);
  to.setDriverVersion(from.driverVersion);
  to.setProblem(from.problem);
}

void write(std::span<const std::string> from, capnp::List<capnp::Text>::Builder to) {
  for (unsigned i = 0; i < to.size() && i < from.size(); ++i) to.set(i, from[i]);
}

void write(const gpupool::LeasedDevice& from, LeasedDevice::Builder to) {
  write(from.info, to.initInfo());
  to.setMemoryBytes(from.memoryBytes);
}

}  // namespace gpupool::schema
