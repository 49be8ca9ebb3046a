#include "server/fabric/verbs_library.h"

#include <dlfcn.h>

#include <cstring>

namespace gpupool::fabric {
namespace {

template <class Function>
void find(void* handle, Function*& function, const char* name, const char* version) {
  function = reinterpret_cast<Function*>(dlvsym(handle, name, version));
}

}  // namespace

bool VerbsLibrary::load(const std::string& path, std::string* why) {
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    *why = error != nullptr ? error : path + " cannot be loaded";
    return false;
  }
  const char* missing = nullptr;
  const auto need = [&](auto*& function, const char* name) {
    find(handle, function, name, "IBVERBS_1.1");
    if (function == nullptr) missing = name;
  };
  need(getDeviceList, "ibv_get_device_list");
  need(freeDeviceList, "ibv_free_device_list");
  need(getDeviceGuid, "ibv_get_device_guid");
  need(openDevice, "ibv_open_device");
  need(closeDevice, "ibv_close_device");
  need(queryDevice, "ibv_query_device");
  need(queryPortCompat, "ibv_query_port");
  need(allocPd, "ibv_alloc_pd");
  need(deallocPd, "ibv_dealloc_pd");
  need(deregMr, "ibv_dereg_mr");
  need(getAsyncEvent, "ibv_get_async_event");
  need(ackAsyncEvent, "ibv_ack_async_event");
  need(eventTypeStr, "ibv_event_type_str");
  find(handle, queryGidTable, "_ibv_query_gid_table", "IBVERBS_1.11");
  find(handle, regDmabufMr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
  if (missing == nullptr) return true;
  *why = path + " lacks " + missing;
  dlclose(handle);
  return false;
}

int VerbsLibrary::queryPort(ibv_context* context, uint8_t port, ibv_port_attr* attributes) const {
  std::memset(attributes, 0, sizeof *attributes);
  // Contexts of today's libraries carry the function, which is told how large our structure is.
  if (verbs_context* extended = verbs_get_ctx_op(context, query_port))
    return extended->query_port(context, port, attributes, sizeof *attributes);
  return queryPortCompat(context, port, reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

}  // namespace gpupool::fabric
