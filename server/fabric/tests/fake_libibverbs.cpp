// Stands for libibverbs.so.1. The file that $FAKE_VERBS names has one line a device: "NAME STATE DMABUF
// PORTS", STATE an ibv_port_state (0: asking fails with EIO) or "shut" (the device cannot be opened), DMABUF
// the errno of the probe. It is read at every call. Devices whose name begins with "old" have a context of
// before 2012, without verbs_context.
//
// fakeVerbsEvent(name, event, port) raises an event; event < 0: the device goes away.

#include <endian.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Line {
  std::string name, state;
  int dmaBuf = 0, ports = 1;
};

std::vector<Line> lines() {
  std::vector<Line> list;
  const char* path = getenv("FAKE_VERBS");
  std::ifstream file(path != nullptr ? path : "");
  for (std::string text; std::getline(file, text);) {
    Line line;
    std::istringstream(text) >> line.name >> line.state >> line.dmaBuf >> line.ports;
    list.push_back(line);
  }
  return list;
}

Line find(const char* name) {
  for (const Line& line : lines())
    if (line.name == name) return line;
  return {name, "0", 0, 1};
}

struct FakeContext {
  verbs_context extended{};
  ibv_device device{};
  int writeEnd = -1;
};
std::map<std::string, FakeContext*> opened;

FakeContext* fake(ibv_context* context) {
  return reinterpret_cast<FakeContext*>(reinterpret_cast<char*>(context) - offsetof(verbs_context, context) -
                                        offsetof(FakeContext, extended));
}

int queryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes, size_t size) {
  if (size < sizeof(ibv_port_attr)) abort();
  const int state = std::atoi(find(context->device->name).state.c_str());
  if (state == 0) return EIO;
  attributes->state = static_cast<ibv_port_state>(state);
  attributes->active_mtu = IBV_MTU_4096;
  attributes->active_width = 2;    // 4 lanes
  attributes->active_speed = 128;  // NDR
  attributes->lid = port;
  attributes->link_layer = IBV_LINK_LAYER_INFINIBAND;
  attributes->gid_tbl_len = 2;
  return 0;
}

}  // namespace

EXPORT ibv_device** newGetDeviceList(int* count) {
  const auto all = lines();
  auto** list = static_cast<ibv_device**>(calloc(all.size() + 1, sizeof(ibv_device*)));
  for (size_t i = 0; i < all.size(); ++i) {
    list[i] = static_cast<ibv_device*>(calloc(1, sizeof(ibv_device)));
    std::snprintf(list[i]->name, sizeof list[i]->name, "%s", all[i].name.c_str());
    list[i]->transport_type = IBV_TRANSPORT_IB;
  }
  if (count != nullptr) *count = static_cast<int>(all.size());
  return list;
}
EXPORT void ibv_free_device_list(ibv_device** list) {
  for (ibv_device** at = list; *at != nullptr; ++at) free(*at);
  free(list);
}
EXPORT __be64 ibv_get_device_guid(ibv_device*) { return htobe64(0xb83fd20300112233); }

EXPORT ibv_context* ibv_open_device(ibv_device* device) {
  if (find(device->name).state == "shut") {
    errno = EACCES;
    return nullptr;
  }
  auto* made = new FakeContext;
  made->device = *device;
  ibv_context& context = made->extended.context;
  context.device = &made->device;
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) abort();
  context.async_fd = ends[0];
  made->writeEnd = ends[1];
  if (std::strncmp(device->name, "old", 3) != 0) {
    context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    made->extended.sz = sizeof(verbs_context);
    made->extended.query_port = queryPort;
  }
  opened[device->name] = made;
  return &context;
}
EXPORT int ibv_close_device(ibv_context* context) {
  FakeContext* made = fake(context);
  close(context->async_fd);
  if (made->writeEnd >= 0) close(made->writeEnd);
  if (opened[made->device.name] == made) opened.erase(made->device.name);
  delete made;
  return 0;
}
EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  std::strcpy(attributes->fw_ver, "28.39.1002");
  attributes->phys_port_cnt = static_cast<uint8_t>(find(context->device->name).ports);
  return 0;
}
EXPORT int newQueryPort(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attributes) {
  if (context->abi_compat == __VERBS_ABI_IS_EXTENDED) abort();  // such a context is asked through its table
  return queryPort(context, port, reinterpret_cast<ibv_port_attr*>(attributes), sizeof(ibv_port_attr));
}
EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  auto* domain = static_cast<ibv_pd*>(calloc(1, sizeof(ibv_pd)));
  domain->context = context;
  return domain;
}
EXPORT int ibv_dealloc_pd(ibv_pd* domain) {
  free(domain);
  return 0;
}
EXPORT int ibv_dereg_mr(ibv_mr*) { return 0; }
EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, uint64_t, size_t, uint64_t, int descriptor, int) {
  errno = descriptor == -1 ? find(domain->context->device->name).dmaBuf : ENOTSUP;
  return nullptr;
}
EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t room, uint32_t,
                                    size_t) {
  const int ports = find(context->device->name).ports;
  ssize_t count = 0;
  for (int port = 1; port <= ports && static_cast<size_t>(count) < room; ++port) {
    ibv_gid_entry& entry = entries[count++];
    entry.port_num = static_cast<uint32_t>(port);
    entry.gid_type = IBV_GID_TYPE_IB;
    entry.gid.raw[0] = 0xfe;
    entry.gid.raw[1] = 0x80;
    entry.gid.raw[15] = static_cast<uint8_t>(port);
  }
  return count;
}
EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  const ssize_t bytes = read(context->async_fd, event, sizeof *event);
  if (bytes == 0) errno = EIO;
  return bytes == sizeof *event ? 0 : -1;
}
EXPORT void ibv_ack_async_event(ibv_async_event*) {}
EXPORT const char* ibv_event_type_str(ibv_event_type type) {
  return type == IBV_EVENT_PORT_ERR       ? "port error"
         : type == IBV_EVENT_DEVICE_FATAL ? "local catastrophic error"
                                          : "other";
}

EXPORT void fakeVerbsEvent(const char* name, int type, int port) {
  FakeContext* made = opened.at(name);
  if (type < 0) {
    close(made->writeEnd);
    made->writeEnd = -1;
    return;
  }
  ibv_async_event event{};
  event.event_type = static_cast<ibv_event_type>(type);
  event.element.port_num = port;
  if (write(made->writeEnd, &event, sizeof event) != sizeof event) abort();
}

// What a lookup with the wrong version, or by a loader that prefers the oldest, would find: functions with
// structures of 2006.
EXPORT void oldGetDeviceList() { abort(); }
EXPORT void oldQueryPort() { abort(); }
__asm__(".symver oldGetDeviceList, ibv_get_device_list@IBVERBS_1.0");
__asm__(".symver oldQueryPort, ibv_query_port@IBVERBS_1.0");
__asm__(".symver newGetDeviceList, ibv_get_device_list@@IBVERBS_1.1");
__asm__(".symver newQueryPort, ibv_query_port@@IBVERBS_1.1");
