// Questions and answers between ranks (bootstrap/asking.h).
#include "bootstrap/asking.h"

#include <cstring>

#include "core/interrupt.h"

namespace tw {
namespace {

constexpr std::chrono::milliseconds kLookForQuestions{20};
constexpr std::chrono::milliseconds kLookForAnswers{2};

}  // namespace

Asking::Asking(Bootstrap* bootstrap, std::vector<int> members, uint64_t tag, Answers answers,
               std::function<int64_t()> counts)
    : bootstrap_(bootstrap),
      members_(std::move(members)),
      tag_(tag),
      counts_(std::move(counts)),
      answered_(members_.size()) {
  if (answers == Answers::kByThread) thread_ = start_thread([this] { answer_until_end(); });
}

Asking::~Asking() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

template <class T>
bool Asking::read(int member, Post post, T* value) {
  std::string bytes;
  if (!bootstrap_->posted(member, tag_ + post, &bytes) || bytes.size() != sizeof *value) return false;
  std::memcpy(value, bytes.data(), sizeof *value);
  return true;
}

template <class T>
void Asking::tell(int member, Post post, const T& value) {
  bootstrap_->post(member, tag_ + post, std::string(reinterpret_cast<const char*>(&value), sizeof value));
}

void Asking::answer_until_end() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookForQuestions, [&] { return ends_; })) answer_others();
}

void Asking::answer() {
  const std::lock_guard lock(mutex_);
  answer_others();
}

void Asking::answer_others() {
  for (size_t i = 0; i < members_.size(); ++i) {
    int64_t question = 0;
    if (members_[i] == bootstrap_->rank() || !read(members_[i], kQuestion, &question)) continue;
    if (question == answered_[i]) continue;
    answered_[i] = question;
    tell(members_[i], kAnswer, Answer{question, counted()});
  }
}

std::vector<int64_t> Asking::ask(TimePoint until, const std::function<bool()>& over) {
  const int64_t question = ++asked_;
  for (const int member : members_) {
    if (member != bootstrap_->rank()) tell(member, kQuestion, question);
  }
  std::vector<int64_t> answers(members_.size(), -1);
  for (;;) {
    answer();  // others may ask at the same time
    bool all = true;
    for (size_t i = 0; i < members_.size(); ++i) {
      if (members_[i] == bootstrap_->rank()) {
        answers[i] = counted();
      } else if (Answer answer{};
                 answers[i] < 0 && read(members_[i], kAnswer, &answer) && answer.question == question) {
        answers[i] = answer.counted;
      }
      all = all && answers[i] >= 0;
    }
    if (all || over() || std::chrono::steady_clock::now() >= until) return answers;
    std::this_thread::sleep_for(kLookForAnswers);
  }
}

}  // namespace tw
