// The record of a group's error with its sentence in parts, which twErrorRecord_t cannot hold. set_sentence keeps both
// alike.
#pragma once

#include "core/sentence.h"

namespace tw {

struct ErrorRecord : twErrorRecord_t {
  Sentence sentence;

  void set_sentence(Sentence said) {
    sentence = std::move(said);
    const std::string text = sentence.text();
    message[text.copy(message, sizeof message - 1)] = '\0';
  }
};

// Makes a record that blames nobody yet.
inline ErrorRecord empty_record() {
  ErrorRecord record{};
  record.size = sizeof(twErrorRecord_t);
  record.peer = record.reporter = record.lane = record.token = record.k = -1;
  return record;
}

}  // namespace tw
