#pragma once
// PCI addresses of the pool's GPUs, as programs see them. A GPU of a server must not be taken for a device of
// the program's own machine, nor for another server's: bus and device are the real ones, and the domain is
// one that the pool makes of the server's name and the real domain, in the upper half of the 16 bits that
// programs give a domain. Machines count theirs from 0.
//
// CUDA (client/session.cpp) and NVML (server/front/figures.h) name a GPU alike, since programs look for one
// by what the other has said.

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

#include "schema/names.h"

namespace gpupool::schema {

struct PciAddress {
  uint32_t domain = 0, bus = 0, device = 0;
};

// "0000:17:00.0", as CUDA and NVML write it. False: it is something else.
inline bool readPciAddress(const std::string& text, PciAddress& address) {
  PciAddress read;
  unsigned function = 0;
  char end = 0;
  if (std::sscanf(text.c_str(), "%8x:%2x:%2x.%1x%c", &read.domain, &read.bus, &read.device, &function,
                  &end) != 4)
    return false;
  address = read;
  return true;
}

// server: ServerInfo.name. Its first 63 bytes count, which is what a holder tells a client of it. Two
// addresses of one server stay two; those of different servers are almost certainly different.
inline PciAddress poolAddress(std::string_view server, PciAddress real) {
  return {0x8000u | ((fnv32(server.substr(0, 63)) + real.domain) & 0x7fffu), real.bus, real.device};
}

// As cuDeviceGetPCIBusId writes it.
inline std::string pciText(const PciAddress& address) {
  char text[32];
  std::snprintf(text, sizeof text, "%04X:%02X:%02X.0", address.domain, address.bus, address.device);
  return text;
}

}  // namespace gpupool::schema
