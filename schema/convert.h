#pragma once
// Between pool.capnp and the plain structs that manager, server and worker share. read() checks nothing but
// shape.

#include "schema/id.h"
#include "schema/pool.capnp.h"

namespace gpupool::schema {

inline Id read(Id128::Reader from) { return {from.getHigh(), from.getLow()}; }

inline void write(const Id& from, Id128::Builder to) {
  to.setHigh(from.high);
  to.setLow(from.low);
}

}  // namespace gpupool::schema
