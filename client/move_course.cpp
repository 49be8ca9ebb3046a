#include "client/move_course.h"

namespace gpupool::client {

using schema::NoticeType;

bool MoveCourse::hear(NoticeType type, uint64_t effect, const schema::MovedBody& moved) {
  switch (type) {
    case NoticeType::prepare:
    case NoticeType::prepareApart:
      if (leaving_) return true;
      if (stage_ == Stage::ending && !again_) {
        again_ = true;
        nextEffect_ = effect;
        nextApart_ = type == NoticeType::prepareApart;
        return true;
      }
      if (stage_ != Stage::none) return false;
      stage_ = Stage::prepared;
      effect_ = effect;
      apart_ = type == NoticeType::prepareApart;
      return true;
    case NoticeType::step:
      if (stage_ != Stage::stopped) return stage_ == Stage::ending || leaving_;
      stage_ = Stage::prepared;
      return true;
    case NoticeType::drained:
    case NoticeType::drainedToShare:
      if (stage_ != Stage::stopped) return stage_ == Stage::ending || leaving_;
      stage_ = Stage::drained;
      mayShare_ = type == NoticeType::drainedToShare;
      return true;
    case NoticeType::moved:
      if (stage_ != Stage::quiet) return stage_ == Stage::ending || leaving_;
      stage_ = Stage::moved;
      epoch_ = moved.epoch;
      held_ = moved.held != 0;
      return true;
    case NoticeType::stay:
      again_ = false;  // it crosses what the client said, and is about the last move
      if (stage_ != Stage::none && stage_ != Stage::going) stage_ = Stage::ending;
      return true;
    default:
      return false;
  }
}

bool MoveCourse::reach(Stage stage) {
  if (stage_ == Stage::none || static_cast<int>(stage) != static_cast<int>(stage_) + 1) return false;
  stage_ = stage;
  return true;
}

bool MoveCourse::refuse() {
  if (stage_ != Stage::prepared) return false;
  stage_ = Stage::ending;
  return true;
}

bool MoveCourse::fails() {
  if (stage_ != Stage::moved) return false;
  stage_ = Stage::ending;
  return true;
}

void MoveCourse::lose() {
  if (stage_ != Stage::none && !open()) stage_ = Stage::ending;
}

bool MoveCourse::failOver(uint32_t epoch) {
  if (leaving_ || stage_ != Stage::none) return false;
  stage_ = Stage::going;
  epoch_ = epoch;
  held_ = true;
  return true;
}

bool MoveCourse::failOverAgain(uint32_t epoch) {
  if (leaving_ || stage_ != Stage::going) return false;
  epoch_ = epoch;
  return true;
}

void MoveCourse::leave() {
  leaving_ = true;
  again_ = false;
  if (stage_ == Stage::none || stage_ == Stage::going || stage_ == Stage::ending) return;
  mute_ = stage_ == Stage::quiet || stage_ == Stage::moved;
  stage_ = Stage::ending;
}

void MoveCourse::arrive() {
  if (stage_ == Stage::going) stage_ = Stage::ending;
}

bool MoveCourse::end() {
  stage_ = again_ ? Stage::prepared : Stage::none;
  effect_ = nextEffect_;
  apart_ = nextApart_;
  const bool again = again_;
  again_ = false;
  return again;
}

}  // namespace gpupool::client
