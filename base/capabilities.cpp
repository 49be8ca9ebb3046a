#include "base/capabilities.h"

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>

namespace gpupool {

bool keepCapabilities(std::span<const int> kept) {
  uint64_t set = 0;
  for (const int capability : kept) set |= uint64_t{1} << capability;
  prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  // Without CAP_SETPCAP the bounding set stays: with no_new_privs nothing comes from it.
  for (int capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0; ++capability)
    if ((set >> capability & 1) == 0) prctl(PR_CAPBSET_DROP, capability, 0, 0, 0);
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  const auto low = static_cast<uint32_t>(set), high = static_cast<uint32_t>(set >> 32);
  const __user_cap_data_struct data[2]{{low, low, 0}, {high, high, 0}};
  return syscall(SYS_capset, &header, data) == 0;
}

std::vector<gid_t> supplementaryGroups() {
  std::vector<gid_t> groups(static_cast<size_t>(std::max(getgroups(0, nullptr), 0)));
  if (getgroups(static_cast<int>(groups.size()), groups.data()) != static_cast<int>(groups.size()))
    throw std::system_error(errno, std::generic_category(), "getgroups");
  return groups;
}

}  // namespace gpupool
