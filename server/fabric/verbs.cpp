#include "server/fabric/verbs.h"

#include <endian.h>
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>

#include "server/fabric/verbs_library.h"

namespace gpupool::fabric {
namespace {

std::string errorText(const char* what, int error) { return std::string(what) + ": " + std::strerror(error); }

const char* transportText(ibv_transport_type type) {
  switch (type) {
    case IBV_TRANSPORT_IB:
      return "InfiniBand";  // RoCE too: the same transport on another link
    case IBV_TRANSPORT_IWARP:
      return "iWARP";
    case IBV_TRANSPORT_USNIC:
    case IBV_TRANSPORT_USNIC_UDP:
      return "usNIC";
    default:
      return "unspecified";
  }
}

PortState stateOf(ibv_port_state state) {
  switch (state) {
    case IBV_PORT_DOWN:
      return PortState::DOWN;
    case IBV_PORT_INIT:
      return PortState::INITIALIZING;
    case IBV_PORT_ARMED:
      return PortState::ARMED;
    case IBV_PORT_ACTIVE:
      return PortState::ACTIVE;
    case IBV_PORT_ACTIVE_DEFER:
      return PortState::ACTIVE_DEFERRED;
    default:
      return PortState::UNKNOWN;
  }
}

// By ibv_port_attr's codes, which end at NDR; sysfs knows later speeds too and wins (inventory.cpp).
uint32_t rateOf(uint8_t speed, uint8_t width) {
  uint32_t lane = 0;  // megabits
  switch (speed) {
    case 1:
      lane = 2'500;
      break;
    case 2:
      lane = 5'000;
      break;
    case 4:
    case 8:
      lane = 10'000;
      break;
    case 16:
      lane = 14'000;
      break;
    case 32:
      lane = 25'000;
      break;
    case 64:
      lane = 50'000;
      break;
    case 128:
      lane = 100'000;
      break;
    default:
      break;
  }
  switch (width) {
    case 1:
      return lane;
    case 2:
      return lane * 4;
    case 4:
      return lane * 8;
    case 8:
      return lane * 12;
    case 16:
      return lane * 2;
    default:
      return 0;
  }
}

Port portOf(uint32_t number, const ibv_port_attr& attributes) {
  Port port;
  port.number = number;
  port.state = stateOf(attributes.state);
  if (attributes.link_layer == IBV_LINK_LAYER_ETHERNET) port.linkLayer = LinkLayer::ETHERNET;
  if (attributes.link_layer == IBV_LINK_LAYER_INFINIBAND) port.linkLayer = LinkLayer::INFINI_BAND;
  port.rateMbps = rateOf(attributes.active_speed, attributes.active_width);
  if (attributes.active_mtu >= IBV_MTU_256 && attributes.active_mtu <= IBV_MTU_4096)
    port.mtu = 128u << attributes.active_mtu;
  port.lid = attributes.lid;
  return port;
}

class RealVerbs final : public Verbs {
 public:
  explicit RealVerbs(const VerbsLibrary& library) : library_(library) {}
  ~RealVerbs() override {
    for (auto& [name, open] : open_) close(open);
  }

  Fabric query() override;
  std::vector<int> descriptors() override;
  std::vector<std::string> events() override;

 private:
  struct Open {
    ibv_context* context = nullptr;
    unsigned ports = 0;
    Device facts;  // those that stay
    bool lost = false;
  };
  void open(ibv_device* device, Open& into);
  void close(Open& open);
  void probeDmaBuf(Open& open);
  Device ask(Open& open);
  void askGids(Open& open, Device& device);
  bool event(const std::string& name, Open& open, std::vector<std::string>& texts);

  VerbsLibrary library_;
  std::map<std::string, Open> open_;
};

void RealVerbs::open(ibv_device* device, Open& into) {
  into.facts.name = device->name;
  into.facts.nodeGuid = be64toh(library_.getDeviceGuid(device));
  into.facts.transport = transportText(device->transport_type);
  errno = 0;
  into.context = library_.openDevice(device);
  if (into.context == nullptr) {
    into.facts.problem = errorText("cannot be opened", errno != 0 ? errno : ENODEV);
    return;
  }
  // Events are taken as they come, never waited for.
  const int flags = fcntl(into.context->async_fd, F_GETFL);
  fcntl(into.context->async_fd, F_SETFL, flags | O_NONBLOCK);
  ibv_device_attr attributes{};
  if (const int error = library_.queryDevice(into.context, &attributes); error != 0)
    into.facts.problem = errorText("cannot be asked", error);
  into.facts.firmware.assign(attributes.fw_ver, strnlen(attributes.fw_ver, sizeof attributes.fw_ver));
  into.ports = attributes.phys_port_cnt;
  probeDmaBuf(into);
}

void RealVerbs::close(Open& open) {
  if (open.context != nullptr) library_.closeDevice(open.context);
  open.context = nullptr;
}

// Who can import dma-bufs gets as far as looking at the descriptor, and finds it bad; the others say before
// that they cannot. (A library or kernel without the call is EOPNOTSUPP, EPROTONOSUPPORT or ENOSYS.)
void RealVerbs::probeDmaBuf(Open& open) {
  Device& facts = open.facts;
  if (library_.regDmabufMr == nullptr) {
    facts.dmaBuf = DmaBuf::UNSUPPORTED;
    facts.dmaBufReason = "libibverbs has no ibv_reg_dmabuf_mr";
    return;
  }
  errno = 0;
  ibv_pd* domain = library_.allocPd(open.context);
  if (domain == nullptr) {
    facts.dmaBufReason = errorText("no protection domain for the probe", errno);
    return;
  }
  constexpr int kNoDescriptor = -1;
  constexpr size_t kLength = 4096;
  ibv_mr* region = library_.regDmabufMr(domain, 0, kLength, 0, kNoDescriptor, IBV_ACCESS_LOCAL_WRITE);
  const int error = region != nullptr ? 0 : errno;
  if (region != nullptr) library_.deregMr(region);
  library_.deallocPd(domain);
  const bool refused = error == EOPNOTSUPP || error == EPROTONOSUPPORT || error == ENOSYS;
  if (error == EBADF) facts.dmaBuf = DmaBuf::SUPPORTED;
  if (refused) facts.dmaBuf = DmaBuf::UNSUPPORTED;
  facts.dmaBufReason = error == 0 ? "the probe registered a descriptor that is none" : std::strerror(error);
}

Fabric RealVerbs::query() {
  Fabric fabric;
  int count = 0;
  errno = 0;
  ibv_device** list = library_.getDeviceList(&count);
  if (list == nullptr)
    fabric.note = errno == ENOSYS ? "the kernel has no RDMA (ib_uverbs is not loaded)"
                                  : errorText("the RDMA devices cannot be listed", errno);
  if (list == nullptr) count = 0;
  // One that went and came back, or failed, is opened afresh; so is one that could not be opened.
  std::map<std::string, Open> still;
  for (int i = 0; i < count; ++i) {
    if (i >= static_cast<int>(kMaxDevices)) {
      fabric.note = std::to_string(count - i) + " more devices are left out";
      break;
    }
    const std::string name = list[i]->name;
    auto known = open_.find(name);
    if (known != open_.end() && known->second.context != nullptr && !known->second.lost &&
        known->second.facts.nodeGuid == be64toh(library_.getDeviceGuid(list[i]))) {
      still[name] = std::move(known->second);
      open_.erase(known);
    } else {
      open(list[i], still[name]);
    }
    fabric.devices.push_back(ask(still[name]));
  }
  if (list != nullptr) library_.freeDeviceList(list);
  for (auto& [name, gone] : open_) close(gone);
  open_ = std::move(still);
  return fabric;
}

Device RealVerbs::ask(Open& open) {
  Device device = open.facts;
  if (open.context == nullptr) return device;
  const unsigned ports = std::min(open.ports, kMaxPorts);
  for (unsigned number = 1; number <= ports; ++number) {
    ibv_port_attr attributes{};
    if (const int error = library_.queryPort(open.context, static_cast<uint8_t>(number), &attributes);
        error != 0) {
      device.problem = errorText(("port " + std::to_string(number) + " cannot be asked").c_str(), error);
      open.lost = open.lost || error == EIO || error == ENODEV;
      device.ports.push_back({});
      device.ports.back().number = number;
      continue;
    }
    device.ports.push_back(portOf(number, attributes));
  }
  askGids(open, device);
  return device;
}

void RealVerbs::askGids(Open& open, Device& device) {
  if (library_.queryGidTable == nullptr || device.ports.empty()) return;
  // Only valid entries are returned; more than fit would be an error, and so would room for more than 64 KiB
  // of the kernel's entries of 32 bytes.
  constexpr size_t kRoom = 2000;
  std::vector<ibv_gid_entry> entries(kRoom);
  const ssize_t count =
      library_.queryGidTable(open.context, entries.data(), entries.size(), 0, sizeof(ibv_gid_entry));
  for (ssize_t i = 0; i < count; ++i) {
    const ibv_gid_entry& entry = entries[static_cast<size_t>(i)];
    if (entry.port_num == 0 || entry.port_num > device.ports.size()) continue;
    Gid gid;
    gid.index = entry.gid_index;
    std::memcpy(gid.value.data(), entry.gid.raw, gid.value.size());
    // enum ib_uverbs_gid_type: IB 0, RoCE v1 1, RoCE v2 2
    if (entry.gid_type <= 2) gid.type = static_cast<GidType>(entry.gid_type + 1);
    device.ports[entry.port_num - 1].gids.push_back(gid);
  }
}

std::vector<int> RealVerbs::descriptors() {
  std::vector<int> list;
  for (const auto& [name, open] : open_)
    if (open.context != nullptr && !open.lost) list.push_back(open.context->async_fd);
  return list;
}

std::vector<std::string> RealVerbs::events() {
  std::vector<std::string> texts;
  for (auto& [name, open] : open_) {
    constexpr int kAtOnce = 256;  // a storm is taken in turns
    for (int i = 0; i < kAtOnce && open.context != nullptr && !open.lost; ++i)
      if (!event(name, open, texts)) break;
  }
  return texts;
}

bool RealVerbs::event(const std::string& name, Open& open, std::vector<std::string>& texts) {
  pollfd ready{open.context->async_fd, POLLIN, 0};
  if (poll(&ready, 1, 0) != 1) return false;
  ibv_async_event event{};
  if (library_.getAsyncEvent(open.context, &event) != 0) {
    // Readable without an event: the device is gone, and would wake us for ever.
    if (errno != EAGAIN && errno != EINTR) {
      open.lost = true;
      texts.push_back(name + ": " + errorText("its events cannot be read", errno));
    }
    return false;
  }
  std::string text = name + ": ";
  switch (event.event_type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
      text += "port " + std::to_string(event.element.port_num) + ": ";
      break;
    case IBV_EVENT_DEVICE_FATAL:
      open.lost = true;
      break;
    default:
      break;
  }
  texts.push_back(text + library_.eventTypeStr(event.event_type));
  library_.ackAsyncEvent(&event);
  return true;
}

}  // namespace

std::unique_ptr<Verbs> loadVerbs(const std::string& library, std::string* why) {
  VerbsLibrary table;
  if (!table.load(library, why)) return nullptr;
  return std::make_unique<RealVerbs>(table);
}

}  // namespace gpupool::fabric
