// A server's report of its fabric: what is refused of it, and what placement reads in it.
#include <capnp/message.h>

#include "catch.h"
#include "pool-manager/fabric.h"
#include "pool-manager/tests/fabric_fixture.h"
#include "support.h"

using namespace gpupool;
using namespace gpupool::pool;
using namespace gpupool::test;

TEST_CASE("a report of the fabric is checked before it is kept") {
  capnp::MallocMessageBuilder message;
  const auto written = [&](const fabric::Fabric& fabric) {
    auto root = message.initRoot<schema::Fabric>();
    fabric::write(fabric, root);
    return root;
  };
  const auto refusal = [](schema::Fabric::Reader from, size_t gpus = 2) {
    return thrown([&] { read(from, gpus); });
  };
  auto good = oneAdapter(fabric::PortState::ACTIVE);
  CHECK(refusal(written(good)).empty());
  CHECK(contains(refusal(written(good), 3), "distances to other GPUs"));
  const auto linked = [&](std::vector<uint64_t> nvlinks) { return written({{}, "", std::move(nvlinks)}); };
  CHECK(refusal(linked({})).empty());
  CHECK(refusal(linked({0, 0})).empty());
  CHECK(contains(refusal(linked({0b10})), "NVLinks of other GPUs"));
  CHECK(contains(refusal(linked({0b10, 0b01, 0})), "NVLinks of other GPUs"));
  CHECK(contains(refusal(linked({0b100, 0})), "GPUs that the server does not have"));
  CHECK(contains(refusal(linked({0b01, 0})), "to itself"));
  CHECK(contains(refusal(linked({0b10, 0})), "only one of its ends"));
  CHECK(contains(refusal(linked({0, 0b01})), "only one of its ends"));
  CHECK(refusal(linked(std::vector<uint64_t>(64)), 64).empty());
  CHECK(contains(refusal(linked(std::vector<uint64_t>(65)), 65), "too many GPUs"));
  good.devices.resize(fabric::kMaxDevices, good.devices[0]);
  CHECK(refusal(written(good)).empty());
  good.devices.push_back(good.devices[0]);
  CHECK(contains(refusal(written(good)), "too many devices"));
  good = oneAdapter(fabric::PortState::ACTIVE);
  good.devices[0].ports.resize(fabric::kMaxPorts + 1);
  CHECK(contains(refusal(written(good)), "too many ports"));
  good = oneAdapter(fabric::PortState::ACTIVE);
  good.devices[0].ports[0].gids.resize(fabric::kMaxGids + 1);
  CHECK(contains(refusal(written(good)), "too many GIDs"));
  good = oneAdapter(fabric::PortState::ACTIVE);
  good.devices[0].name = "";
  CHECK(contains(refusal(written(good)), "without a name"));

  auto hostile = written(oneAdapter(fabric::PortState::ACTIVE));
  auto port = hostile.getDevices()[0].getPorts()[0];
  port.getGids()[0].setValue(kj::StringPtr("short").asBytes());
  CHECK(contains(refusal(hostile), "not 16 bytes"));

  hostile = written(oneAdapter(fabric::PortState::ACTIVE));
  auto device = hostile.getDevices()[0];
  device.setName("\x1b[2J" + std::string(500, 'x'));
  device.getPorts()[0].setNetdev("eth\n0");
  device.getPorts()[0].setState(static_cast<fabric::PortState>(77));
  device.getPorts()[0].setLinkLayer(static_cast<fabric::LinkLayer>(77));
  device.getPorts()[0].getGids()[0].setType(static_cast<fabric::GidType>(77));
  device.setDmaBuf(static_cast<fabric::DmaBuf>(77));
  device.getGpuDistances().set(0, static_cast<fabric::PciDistance>(77));
  const auto cleaned = read(hostile.asReader(), 2).devices.at(0);
  CHECK(cleaned.name == "?[2J" + std::string(fabric::kMaxText - 4, 'x'));
  CHECK(cleaned.ports.at(0).netdev == "eth?0");
  CHECK(cleaned.ports[0].state == fabric::PortState::UNKNOWN);
  CHECK(cleaned.ports[0].linkLayer == fabric::LinkLayer::UNKNOWN);
  CHECK(cleaned.ports[0].gids.at(0).type == fabric::GidType::UNKNOWN);
  CHECK(cleaned.dmaBuf == fabric::DmaBuf::UNKNOWN);
  CHECK(cleaned.gpuDistances.at(0) == fabric::PciDistance::UNKNOWN);
}

TEST_CASE("the nearest adapter is one with an active port, and at a distance that is known") {
  fabric::Fabric fabric = oneAdapter(fabric::PortState::ACTIVE);
  CHECK(nearestAdapters(fabric, 2) ==
        std::vector<Adapter>{{"mlx5_0", fabric::PciDistance::PIX}, {"mlx5_0", fabric::PciDistance::SYS}});
  fabric.devices.push_back(fabric.devices[0]);
  fabric.devices[1].name = "mlx5_1";
  fabric.devices[1].gpuDistances = {fabric::PciDistance::PIX, fabric::PciDistance::PXB};
  CHECK(nearestAdapters(fabric, 2) ==
        std::vector<Adapter>{{"mlx5_0", fabric::PciDistance::PIX}, {"mlx5_1", fabric::PciDistance::PXB}});
  fabric.devices[0].ports[0].state = fabric::PortState::ACTIVE_DEFERRED;
  fabric.devices[1].gpuDistances[1] = fabric::PciDistance::UNKNOWN;
  CHECK(nearestAdapters(fabric, 2) == std::vector<Adapter>{{"mlx5_1", fabric::PciDistance::PIX}, {}});
  fabric.devices[1].gpuDistances.clear();  // a server may tell of none
  CHECK(nearestAdapters(fabric, 2) == std::vector<Adapter>(2));
}
