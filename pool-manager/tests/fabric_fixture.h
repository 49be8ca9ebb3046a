#pragma once
// What a server with two GPUs says of its fabric, for tests.

#include "schema/fabric.h"

namespace gpupool::test {

// Near to the first GPU, and NVLink joins both.
inline fabric::Fabric oneAdapter(fabric::PortState state) {
  fabric::Port port;
  port.number = 1;
  port.state = state;
  port.gids = {{3, {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 1}, fabric::GidType::ROCE_V2}};
  port.defaultGid = 3;
  fabric::Device device;
  device.name = "mlx5_0";
  device.nodeGuid = 0xb83fd20300112233;
  device.gpuDistances = {fabric::PciDistance::PIX, fabric::PciDistance::SYS};
  device.dmaBuf = fabric::DmaBuf::SUPPORTED;
  device.ports = {port};
  return {{device}, "one more is left out", {0b10, 0b01}};
}

}  // namespace gpupool::test
