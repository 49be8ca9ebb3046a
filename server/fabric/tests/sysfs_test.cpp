// PCI distances, NUMA nodes, rates and interfaces, read from a sysfs that the test makes: the tree of a
// machine with two sockets, as an 8-GPU server has it.
#include "server/fabric/sysfs.h"

#include <stdlib.h>

#include <fstream>

#include "catch.h"
#include "server/fabric/inventory.h"
#include "server/fabric/tests/fake_verbs.h"

using namespace gpupool::fabric;
using gpupool::fabric::test::adapter;
namespace fs = std::filesystem;

namespace {

class Tree {
 public:
  Tree() {
    char name[] = "/tmp/gpupool-sysfs-XXXXXX";
    root = ::mkdtemp(name);
    for (const char* node : {"node0", "node1"}) fs::create_directories(root / "devices/system/node" / node);
    // Socket 0: a root port with a switch (GPU, two adapters), below that one another switch (GPU).
    pci("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00.0", 0);  // GPU 0
    pci("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0", 0);  // mlx5_0
    pci("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:02.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0",
        0);                                          // GPU 1
    pci("pci0000:15/0000:15:02.0/0000:20:00.0", 0);  // mlx5_1, at another root port
    pci("pci0000:15/0000:15:02.0/0000:20:00.1", 0);  // its second function
    pci("pci0000:37/0000:37:01.0/0000:38:00.0", 0);  // mlx5_3, at another host bridge
    pci("pci0000:97/0000:97:01.0/0000:98:00.0", 1);  // GPU 2, at the other socket
    rdma("mlx5_0", "0000:19:00.0");
    rdma("mlx5_1", "0000:20:00.0");
    rdma("mlx5_2", "0000:20:00.1");
    rdma("mlx5_3", "0000:38:00.0");
  }
  ~Tree() { fs::remove_all(root); }

  void pci(const std::string& chain, int node) {
    const fs::path device = root / "devices" / chain;
    fs::create_directories(device);
    text(device / "numa_node", std::to_string(node));
    link("bus/pci/devices" / device.filename(), device);
  }
  // As the kernel lays it: the class's entry is a link into the device's folder.
  void rdma(const std::string& name, const std::string& address) {
    const fs::path device = fs::canonical(root / "bus/pci/devices" / address);
    fs::create_directories(device / "infiniband" / name);
    link(fs::path("class/infiniband") / name, device / "infiniband" / name);
    fs::create_directory_symlink("../..", device / "infiniband" / name / "device");
  }
  void text(const fs::path& path, const std::string& line) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << line << "\n";
  }
  void link(const fs::path& name, const fs::path& target) {
    const fs::path at = root / name;
    fs::create_directories(at.parent_path());
    fs::create_directory_symlink(fs::relative(target, fs::canonical(at.parent_path())), at);
  }

  fs::path root;
};

}  // namespace

TEST_CASE("the distance between an adapter and a GPU is what nvidia-smi topo calls it") {
  Tree tree;
  const Sysfs sysfs(tree.root);
  REQUIRE(sysfs.numaNodes() == 2);
  const auto between = [&](const char* adapter, const char* gpu) {
    return distance(sysfs.rdmaPlace(adapter, ""), sysfs.pciPlace(gpu), sysfs.numaNodes());
  };
  CHECK(between("mlx5_0", "0000:18:00.0") == PciDistance::PIX);   // one switch
  CHECK(between("mlx5_0", "0000:1C:00.0") == PciDistance::PXB);   // two switches; CUDA writes upper case
  CHECK(between("mlx5_1", "0000:18:00.0") == PciDistance::PHB);   // two root ports of one host bridge
  CHECK(between("mlx5_3", "0000:18:00.0") == PciDistance::NODE);  // two host bridges of one node
  CHECK(between("mlx5_0", "0000:98:00.0") == PciDistance::SYS);
  CHECK(between("mlx5_1", "0000:20:00.1") == PciDistance::PIX);      // two functions of one card
  CHECK(between("mlx5_0", "00000000:18:00.0") == PciDistance::PIX);  // as nvidia-smi writes it
  CHECK(between("mlx5_0", "18:00.0") == PciDistance::PIX);
  CHECK(between("mlx5_0", "") == PciDistance::UNKNOWN);  // the software GPU
  CHECK(between("mlx5_0", "0000:7f:00.0") == PciDistance::UNKNOWN);
  CHECK(between("mlx5_9", "0000:18:00.0") == PciDistance::UNKNOWN);
  CHECK(between("mlx5_0", "../../../0000:18:00.0") == PciDistance::UNKNOWN);
}

TEST_CASE("without NUMA, host bridges are of one node; where nodes are unknown among several, they are not") {
  PciPlace one{"0000:01:00.0", {"pci0000:00", "0000:01:00.0"}, -1};
  PciPlace other{"0001:01:00.0", {"pci0001:00", "0001:01:00.0"}, -1};
  CHECK(distance(one, other, 1) == PciDistance::NODE);
  CHECK(distance(one, other, 0) == PciDistance::NODE);
  CHECK(distance(one, other, 2) == PciDistance::SYS);
  one.numaNode = other.numaNode = 1;
  CHECK(distance(one, other, 2) == PciDistance::NODE);
}

TEST_CASE("places: addresses, NUMA nodes, sub-functions, and software on an adapter's interface") {
  Tree tree;
  const Sysfs sysfs(tree.root);
  CHECK(sysfs.rdmaPlace("mlx5_1", "").address == "0000:20:00.0");
  CHECK(sysfs.rdmaPlace("mlx5_0", "").numaNode == 0);
  CHECK(sysfs.pciPlace("0000:98:00.0").numaNode == 1);

  // A sub-function's device hangs below the PCI one.
  const fs::path below = fs::canonical(tree.root / "bus/pci/devices/0000:98:00.0") / "mlx5_core.sf.4";
  fs::create_directories(below / "infiniband/mlx5_4");
  tree.link("class/infiniband/mlx5_4", below / "infiniband/mlx5_4");
  fs::create_directory_symlink("../..", below / "infiniband/mlx5_4/device");
  CHECK(sysfs.rdmaPlace("mlx5_4", "").address == "0000:98:00.0");
  CHECK(sysfs.rdmaPlace("mlx5_4", "").numaNode == 1);

  // Soft-RoCE has no device; its interface has, or is virtual as well.
  fs::create_directories(tree.root / "devices/virtual/infiniband/rxe0");
  tree.link("class/infiniband/rxe0", tree.root / "devices/virtual/infiniband/rxe0");
  tree.text(tree.root / "class/infiniband/rxe0/parent", "eth2");
  CHECK(sysfs.netdev("rxe0", 1, -1) == "eth2");
  CHECK(sysfs.rdmaPlace("rxe0", "eth2").address.empty());
  fs::create_directories(tree.root / "class/net/eth2");
  tree.link("class/net/eth2/device", fs::canonical(tree.root / "bus/pci/devices/0000:38:00.0"));
  CHECK(sysfs.rdmaPlace("rxe0", "eth2").address == "0000:38:00.0");
  CHECK(sysfs.rdmaPlace("rxe0", "veth0").address.empty());
}

TEST_CASE("rates of every generation, and what is no rate") {
  Tree tree;
  const Sysfs sysfs(tree.root);
  const auto rate = [&](const std::string& line) {
    tree.text(tree.root / "class/infiniband/mlx5_0/ports/1/rate", line);
    return sysfs.rateMbps("mlx5_0", 1);
  };
  CHECK(rate("2.5 Gb/sec (1X SDR)") == 2'500);
  CHECK(rate("56 Gb/sec (4X FDR)") == 56'000);
  CHECK(rate("400 Gb/sec (4X NDR)") == 400'000);
  CHECK(rate("800 Gb/sec (4X XDR)") == 800'000);
  CHECK(rate("") == 0);
  CHECK(rate("fast") == 0);
  CHECK(rate("-1 Gb/sec") == 0);
  CHECK(rate("1e300 Gb/sec") == 0);
  CHECK(rate("100 Mb/sec") == 0);
  CHECK(sysfs.rateMbps("mlx5_0", 2) == 0);
}

TEST_CASE("the interface of a port: by its GID, by the port's number, the only one") {
  Tree tree;
  const Sysfs sysfs(tree.root);
  const fs::path device = fs::canonical(tree.root / "bus/pci/devices/0000:19:00.0");
  CHECK(sysfs.netdev("mlx5_0", 1, 3).empty());
  tree.text(device / "net/ens1/dev_port", "1");
  CHECK(sysfs.netdev("mlx5_0", 1, 3) == "ens1");
  tree.text(device / "net/ens0/dev_port", "0");
  CHECK(sysfs.netdev("mlx5_0", 1, 3) == "ens0");
  CHECK(sysfs.netdev("mlx5_0", 2, 3) == "ens1");
  tree.text(tree.root / "class/infiniband/mlx5_0/ports/1/gid_attrs/ndevs/3", "ens0.17");
  CHECK(sysfs.netdev("mlx5_0", 1, 3) == "ens0.17");
}

TEST_CASE("an inventory is what libibverbs says with what sysfs adds") {
  Tree tree;
  tree.text(tree.root / "class/infiniband/mlx5_0/ports/1/rate", "400 Gb/sec (4X NDR)");
  auto adapters = std::make_shared<test::Adapters>();
  adapters->change([](Fabric& fabric) { fabric.devices = {adapter("mlx5_0"), adapter("mlx5_3")}; });
  test::FakeVerbs verbs(adapters);
  const Fabric fabric = takeInventory(verbs, Sysfs(tree.root), {"0000:18:00.0", "", "0000:98:00.0"});
  REQUIRE(fabric.devices.size() == 2);
  CHECK(fabric.devices[0].gpuDistances ==
        std::vector<PciDistance>{PciDistance::PIX, PciDistance::UNKNOWN, PciDistance::SYS});
  CHECK(fabric.devices[0].pciAddress == "0000:19:00.0");
  CHECK(fabric.devices[0].ports[0].rateMbps == 400'000);
  CHECK(fabric.devices[1].gpuDistances[0] == PciDistance::NODE);
  CHECK(fabric.devices[1].ports[0].rateMbps == 1000);  // sysfs does not say: what the library said
}
