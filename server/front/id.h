#pragma once
// A 128-bit name (lease, session, incarnation) as a value; the wire's is schema::Id128.

#include <compare>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/hmac.h"
#include "schema/pool.capnp.h"

namespace gpupool::server {

struct Id {
  uint64_t high = 0, low = 0;
  auto operator<=>(const Id&) const = default;

  static Id read(schema::Id128::Reader from) { return {from.getHigh(), from.getLow()}; }
  static Id random() {
    Id id;
    randomBytes(std::as_writable_bytes(std::span(&id, 1)));
    return id;
  }
  void write(schema::Id128::Builder to) const {
    to.setHigh(high);
    to.setLow(low);
  }
  std::string text() const {
    char hex[33];
    std::snprintf(hex, sizeof hex, "%016llx%016llx", static_cast<unsigned long long>(high),
                  static_cast<unsigned long long>(low));
    return hex;
  }
};

}  // namespace gpupool::server
