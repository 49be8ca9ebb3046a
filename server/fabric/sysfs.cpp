#include "server/fabric/sysfs.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <fstream>

namespace gpupool::fabric {
namespace {

namespace fs = std::filesystem;

std::string firstLine(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// Each character of the pattern: 'x' a hexadecimal digit, else itself.
bool looksLike(const std::string& text, const char* pattern) {
  size_t at = 0;
  for (; *pattern != '\0'; ++pattern, ++at) {
    if (at == text.size()) return false;
    const bool digit = std::isxdigit(static_cast<unsigned char>(text[at])) != 0;
    if (*pattern == 'x' ? !digit : text[at] != *pattern) return false;
  }
  return at == text.size();
}

bool isPciAddress(const std::string& text) { return looksLike(text, "xxxx:xx:xx.x"); }
bool isHostBridge(const std::string& text) { return looksLike(text, "pcixxxx:xx"); }

std::string spelledAsSysfs(std::string address) {
  for (char& c : address) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (looksLike(address, "xxxxxxxx:xx:xx.x") && address.rfind("0000", 0) == 0) address.erase(0, 4);
  if (looksLike(address, "xx:xx.x")) address = "0000:" + address;
  return address;
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::vector<fs::path> list;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    list.push_back(at->path());
  std::sort(list.begin(), list.end());
  return list;
}

}  // namespace

PciDistance distance(const PciPlace& one, const PciPlace& other, unsigned numaNodes) {
  if (one.chain.empty() || other.chain.empty()) return PciDistance::UNKNOWN;
  const auto& a = one.chain;
  const auto& b = other.chain;
  const size_t shorter = std::min(a.size(), b.size());
  size_t common = 0;
  while (common < shorter && a[common] == b[common]) ++common;
  if (common == 0) {
    const bool sameNode = numaNodes <= 1 || (one.numaNode == other.numaNode && one.numaNode >= 0);
    return sameNode ? PciDistance::NODE : PciDistance::SYS;
  }
  if (common == 1) return PciDistance::PHB;
  // Below the last bridge in common each has its own ports of switches, and then itself.
  constexpr size_t kPortAndSelf = 2;
  return std::max(a.size(), b.size()) - common <= kPortAndSelf ? PciDistance::PIX : PciDistance::PXB;
}

unsigned Sysfs::numaNodes() const {
  unsigned count = 0;
  for (const auto& entry : entries(root_ / "devices/system/node")) {
    const std::string name = entry.filename();
    if (name.size() > 4 && name.rfind("node", 0) == 0 && std::isdigit(static_cast<unsigned char>(name[4])))
      ++count;
  }
  return count;
}

// The link leads to a PCI device or to something that hangs below one (a sub-function of an adapter).
PciPlace Sysfs::placeOf(const fs::path& link) const {
  std::error_code error;
  const fs::path real = fs::canonical(link, error);
  if (error) return {};
  PciPlace place;
  fs::path here, device;
  for (const auto& part : real) {
    here /= part;
    const std::string name = part;
    if (place.chain.empty() ? !isHostBridge(name) : !isPciAddress(name)) {
      if (place.chain.empty()) continue;
      break;
    }
    place.chain.push_back(name);
    device = here;
  }
  if (place.chain.size() < 2) return {};
  place.address = place.chain.back();
  const std::string node = firstLine(device / "numa_node");
  place.numaNode = node.empty() ? -1 : std::atoi(node.c_str());
  return place;
}

PciPlace Sysfs::pciPlace(const std::string& address) const {
  const std::string spelled = spelledAsSysfs(address);
  return isPciAddress(spelled) ? placeOf(root_ / "bus/pci/devices" / spelled) : PciPlace();
}

PciPlace Sysfs::rdmaPlace(const std::string& device, const std::string& netdev) const {
  PciPlace own = placeOf(root_ / "class/infiniband" / device / "device");
  if (!own.address.empty() || netdev.empty()) return own;
  return placeOf(root_ / "class/net" / netdev / "device");
}

fs::path Sysfs::port(const std::string& device, uint32_t number) const {
  return root_ / "class/infiniband" / device / "ports" / std::to_string(number);
}

uint32_t Sysfs::rateMbps(const std::string& device, uint32_t number) const {
  const std::string line = firstLine(port(device, number) / "rate");
  char* end = nullptr;
  const double gigabits = std::strtod(line.c_str(), &end);
  if (std::string(end).rfind(" Gb/sec", 0) != 0 || !(gigabits > 0 && gigabits < 1e6)) return 0;
  return static_cast<uint32_t>(std::lround(gigabits * 1000));
}

std::string Sysfs::netdev(const std::string& device, uint32_t number, int32_t gid) const {
  if (gid >= 0) {
    const std::string name = firstLine(port(device, number) / "gid_attrs/ndevs" / std::to_string(gid));
    if (!name.empty()) return name;
  }
  // Several interfaces of one PCI function: the one with this port's number.
  const auto interfaces = entries(root_ / "class/infiniband" / device / "device/net");
  for (const auto& entry : interfaces)
    if (firstLine(entry / "dev_port") == std::to_string(number - 1)) return entry.filename();
  if (interfaces.size() == 1) return interfaces[0].filename();
  return firstLine(root_ / "class/infiniband" / device / "parent");  // Soft-RoCE's
}

}  // namespace gpupool::fabric
