// libibverbs as it is loaded and asked, with a library that stands for it (fake_libibverbs.cpp).
#include "server/fabric/verbs.h"

#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>

#include "catch.h"

using namespace gpupool::fabric;

namespace {

struct Bench {
  Bench() {
    char name[] = "/tmp/gpupool-verbs-XXXXXX";
    close(mkstemp(name));
    path = name;
    setenv("FAKE_VERBS", name, 1);
    std::string why;
    verbs = loadVerbs(FAKE_LIBIBVERBS, &why);
    REQUIRE(why == "");
    REQUIRE(verbs != nullptr);
  }
  ~Bench() {
    verbs = nullptr;
    unlink(path.c_str());
  }
  Fabric with(const std::string& text) {
    std::ofstream(path, std::ios::trunc) << text;
    return verbs->query();
  }
  void raise(const char* name, int type, int port = 0) {
    void* library = dlopen(FAKE_LIBIBVERBS, RTLD_NOW | RTLD_NOLOAD);
    reinterpret_cast<void (*)(const char*, int, int)>(dlsym(library, "fakeVerbsEvent"))(name, type, port);
    dlclose(library);
  }
  bool readable() {
    for (int descriptor : verbs->descriptors()) {
      pollfd waited{descriptor, POLLIN, 0};
      if (poll(&waited, 1, 0) > 0) return true;
    }
    return false;
  }

  std::string path;
  std::unique_ptr<Verbs> verbs;
};

std::string line(const char* name, int state, int dmaBuf = EOPNOTSUPP, int ports = 1) {
  return std::string(name) + " " + std::to_string(state) + " " + std::to_string(dmaBuf) + " " +
         std::to_string(ports) + "\n";
}

}  // namespace

TEST_CASE_METHOD(Bench, "what a device says of itself and its ports, through contexts new and old") {
  const Fabric fabric = with(line("mlx5_0", IBV_PORT_ACTIVE, EBADF, 2) + line("old_0", IBV_PORT_INIT));
  CHECK(fabric.note == "");
  REQUIRE(fabric.devices.size() == 2);
  const Device& device = fabric.devices[0];
  CHECK(device.name == "mlx5_0");
  CHECK(device.nodeGuid == 0xb83fd20300112233);
  CHECK(device.firmware == "28.39.1002");
  CHECK(device.transport == "InfiniBand");
  CHECK(device.problem == "");
  REQUIRE(device.ports.size() == 2);
  CHECK(device.ports[1].number == 2);
  CHECK(device.ports[1].state == PortState::ACTIVE);
  CHECK(device.ports[1].linkLayer == LinkLayer::INFINI_BAND);
  CHECK(device.ports[1].rateMbps == 400'000);
  CHECK(device.ports[1].mtu == 4096);
  CHECK(device.ports[1].lid == 2);
  REQUIRE(device.ports[1].gids.size() == 1);
  CHECK(device.ports[1].gids[0].type == GidType::INFINI_BAND);
  CHECK(device.ports[1].gids[0].value[15] == 2);
  CHECK(fabric.devices[1].ports.at(0).state == PortState::INITIALIZING);
}

TEST_CASE_METHOD(Bench, "dma-buf: only who finds the descriptor bad can import one") {
  const auto capability = [this](int error) {
    with("");  // opened afresh
    return with(line("mlx5_0", IBV_PORT_ACTIVE, error)).devices.at(0).dmaBuf;
  };
  CHECK(capability(EBADF) == DmaBuf::SUPPORTED);
  CHECK(capability(EOPNOTSUPP) == DmaBuf::UNSUPPORTED);
  CHECK(capability(EPROTONOSUPPORT) == DmaBuf::UNSUPPORTED);
  CHECK(capability(ENOSYS) == DmaBuf::UNSUPPORTED);
  CHECK(capability(ENOMEM) == DmaBuf::UNKNOWN);
  CHECK(capability(EINVAL) == DmaBuf::UNKNOWN);
  CHECK(verbs->query().devices.at(0).dmaBufReason == "Invalid argument");
}

TEST_CASE_METHOD(Bench, "events are told and taken") {
  with(line("mlx5_0", IBV_PORT_ACTIVE));
  CHECK_FALSE(readable());
  CHECK(verbs->events().empty());  // without waiting
  raise("mlx5_0", IBV_EVENT_PORT_ERR, 1);
  CHECK(readable());
  CHECK(verbs->events() == std::vector<std::string>{"mlx5_0: port 1: port error"});
  CHECK_FALSE(readable());
  CHECK(with(line("mlx5_0", IBV_PORT_DOWN)).devices.at(0).ports.at(0).state == PortState::DOWN);
}

TEST_CASE_METHOD(Bench, "a device that failed does not wake for ever, and is opened again") {
  with(line("mlx5_0", IBV_PORT_ACTIVE));
  raise("mlx5_0", IBV_EVENT_DEVICE_FATAL);
  CHECK(verbs->events() == std::vector<std::string>{"mlx5_0: local catastrophic error"});
  CHECK(verbs->descriptors().empty());
  CHECK(verbs->query().devices.at(0).ports.at(0).state == PortState::ACTIVE);
  CHECK(verbs->descriptors().size() == 1);
  raise("mlx5_0", -1);  // gone: readable, and nothing to read
  CHECK(readable());
  CHECK(verbs->events() == std::vector<std::string>{"mlx5_0: its events cannot be read: Input/output error"});
  CHECK(verbs->descriptors().empty());
  CHECK(with("").devices.empty());
}

TEST_CASE_METHOD(Bench, "a device that cannot be opened or asked is there with its problem") {
  Fabric fabric = with("mlx5_0 shut 0 1\n" + line("mlx5_1", 0));
  REQUIRE(fabric.devices.size() == 2);
  CHECK(fabric.devices[0].problem == "cannot be opened: Permission denied");
  CHECK(fabric.devices[0].ports.empty());
  CHECK(fabric.devices[1].problem == "port 1 cannot be asked: Input/output error");
  REQUIRE(fabric.devices[1].ports.size() == 1);
  CHECK(fabric.devices[1].ports[0].state == PortState::UNKNOWN);
  CHECK(fabric.devices[1].ports[0].number == 1);
  fabric = with(line("mlx5_0", IBV_PORT_ACTIVE) + line("mlx5_1", IBV_PORT_ACTIVE));
  for (const Device& device : fabric.devices) CHECK(device.problem == "");
}

TEST_CASE_METHOD(Bench, "no more devices and ports than a report holds") {
  std::string text;
  for (int i = 0; i < 70; ++i) text += line(("vf" + std::to_string(i)).c_str(), IBV_PORT_ACTIVE, EBADF, 20);
  const Fabric fabric = with(text);
  CHECK(fabric.devices.size() == kMaxDevices);
  CHECK(fabric.devices[0].ports.size() == kMaxPorts);
  CHECK(fabric.note == "6 more devices are left out");
  CHECK(with("").devices.empty());
}

TEST_CASE("what is not libibverbs is refused by the name of what it lacks") {
  std::string why;
  CHECK(loadVerbs("libm.so.6", &why) == nullptr);
  CHECK(why.find("libm.so.6 lacks ibv_") == 0);
}
