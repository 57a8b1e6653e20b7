// Builds sentences out of text and marked parts, and their text out of the parts. Nothing but what errors say depends
// on this file.
#include "core/sentence.h"

#include <algorithm>
#include <cstdio>

namespace tw {
namespace {

template <class Number>
std::string printed(const char* format, Number value) {
  char text[64];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

std::string text_of(const Argument& argument) {
  std::string text = argument.path;
  const size_t place = text.find("[]");
  if (place == std::string::npos) return text;
  if (argument.indices[0] < 0) return text.erase(place, 2);
  std::string indices = std::to_string(argument.indices[0]);
  if (argument.indices[1] >= 0) indices += ", " + std::to_string(argument.indices[1]);
  return text.insert(place + 1, indices);
}

Sentence::Part number_of(twPartKind_t kind, std::string text, int64_t value) {
  return {kind, std::move(text), "", {-1, -1}, value};
}

}  // namespace

Sentence::Sentence(const Sentence& other) {
  if (other.parts_) parts_.reset(new std::vector<Part>(*other.parts_));
}
Sentence& Sentence::operator=(const Sentence& other) { return *this = Sentence(other); }
void Sentence::Free::operator()(std::vector<Part>* parts) const { delete parts; }

Sentence::Sentence(Number number)
    : Sentence(number.is_signed ? std::to_string(static_cast<int64_t>(number.bits)) : std::to_string(number.bits)) {}
Sentence::Sentence(std::string_view text) { append({twPartText, std::string(text), ""}); }
Sentence::Sentence(double number) : Sentence(printed("%g", number)) {}
Sentence::Sentence(const void* pointer) : Sentence(printed("%p", pointer)) {}
Sentence::Sentence(const Argument& argument) {
  append({twPartArgument, text_of(argument), argument.path, {argument.indices[0], argument.indices[1]}});
}
Sentence::Sentence(const Value& value) {
  append(number_of(twPartValue, value.beyond > 0 ? std::to_string(value.beyond) : std::to_string(value.value),
                   value.value));
}
Sentence::Sentence(const Least& least) { append(number_of(twPartLeast, std::to_string(least.value), least.value)); }
Sentence::Sentence(const Most& most) { append(number_of(twPartMost, std::to_string(most.value), most.value)); }
Sentence::Sentence(const Constant& constant) {
  Part part = number_of(twPartConstant, std::string(constant.name) + " (" + std::to_string(constant.value) + ")",
                        constant.value);
  part.name = constant.name;
  append(std::move(part));
}
Sentence::Sentence(const Function& function) { append({twPartFunction, function.name, function.name}); }
Sentence::Sentence(const UnderWay& call) { append({twPartUnderWay, call.name, call.name}); }

void Sentence::append(Part part) {
  if (part.kind == twPartText && part.text.empty()) return;
  if (!parts_) parts_.reset(new std::vector<Part>);
  std::vector<Part>& parts = *parts_;
  if (part.kind == twPartText && !parts.empty() && parts.back().kind == twPartText) {
    parts.back().text += part.text;
    return;
  }
  const bool of_argument = part.kind == twPartValue || part.kind == twPartLeast || part.kind == twPartMost;
  const auto argument =
      std::find_if(parts.rbegin(), parts.rend(), [](const Part& before) { return before.kind == twPartArgument; });
  if (of_argument && part.name.empty() && argument != parts.rend()) {
    part.name = argument->name;
    std::copy(argument->indices, argument->indices + 2, part.indices);
  }
  parts.push_back(std::move(part));
}

void Sentence::append(const Sentence& more) {
  for (const Part& part : more.parts()) append(part);
}

const std::vector<Sentence::Part>& Sentence::parts() const {
  static const std::vector<Part> none;
  return parts_ ? *parts_ : none;
}

std::string Sentence::text() const {
  std::string text;
  for (const Part& part : parts()) text += part.text;
  return text;
}

Sentence fill(std::string_view format, std::initializer_list<Sentence> values) {
  Sentence sentence;
  for (const Sentence& value : values) {
    const size_t place = format.find("{}");
    sentence.append(Sentence(format.substr(0, place)));
    sentence.append(value);
    format.remove_prefix(place + 2);
  }
  sentence.append(Sentence(format));
  return sentence;
}

}  // namespace tw
