#include "schema/device_sample.h"

namespace gpupool::schema {

gpupool::DeviceSample read(DeviceSample::Reader from) {
  return {from.getAgeMs(),      from.getGpuPercent(),   from.getMemoryPercent(), from.getUsedBytes(),
          from.getTotalBytes(), from.getTemperatureC(), from.getPowerMw(),       from.getPowerLimitMw(),
          from.getSmMhz(),      from.getMemoryMhz(),    from.getEccErrors(),     from.getNvlinks(),
          from.getXid()};
}

void write(const gpupool::DeviceSample& from, DeviceSample::Builder to) {
  to.setAgeMs(from.ageMs);
  to.setGpuPercent(from.gpuPercent);
  to.setMemoryPercent(from.memoryPercent);
  to.setUsedBytes(from.usedBytes);
  to.setTotalBytes(from.totalBytes);
  to.setTemperatureC(from.temperatureC);
  to.setPowerMw(from.powerMw);
  to.setPowerLimitMw(from.powerLimitMw);
  to.setSmMhz(from.smMhz);
  to.setMemoryMhz(from.memoryMhz);
  to.setEccErrors(from.eccErrors);
  to.setNvlinks(from.nvlinks);
  to.setXid(from.xid);
}

}  // namespace gpupool::schema
