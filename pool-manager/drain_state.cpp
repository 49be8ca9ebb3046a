#include "pool-manager/drain_state.h"

#include "pool-manager/convert.h"

namespace gpupool::pool {

DrainState read(schema::DrainState::Reader from) {
  DrainState to{from.getCordoned(), from.getMoving(), from.getGoesOn(), {}, {}, from.getLatest()};
  for (auto one : from.getLeases())
    to.leases.push_back({read(one.getId()), text(one.getState()), one.getLeaves(), text(one.getNote())});
  for (auto one : from.getWords())
    to.words.push_back({one.getNumber(), read(one.getLease()), one.getMoved(), text(one.getText())});
  return to;
}

void write(const DrainState& from, schema::DrainState::Builder to) {
  to.setCordoned(from.cordoned);
  to.setMoving(from.moving);
  to.setGoesOn(from.goesOn);
  auto leases = to.initLeases(static_cast<unsigned>(from.leases.size()));
  for (unsigned i = 0; i < leases.size(); ++i) {
    const DrainedLease& one = from.leases[i];
    write(one.id, leases[i].initId());
    leases[i].setState(one.state);
    leases[i].setLeaves(one.leaves);
    leases[i].setNote(one.note);
  }
  auto words = to.initWords(static_cast<unsigned>(from.words.size()));
  for (unsigned i = 0; i < words.size(); ++i) {
    const DrainWord& one = from.words[i];
    words[i].setNumber(one.number);
    write(one.lease, words[i].initLease());
    words[i].setMoved(one.moved);
    words[i].setText(one.text);
  }
  to.setLatest(from.latest);
}

}  // namespace gpupool::pool
