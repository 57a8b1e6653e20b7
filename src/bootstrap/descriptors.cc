// Limits of file descriptors, and the sentences for running out of them (bootstrap/descriptors.h). It raises the soft
// limit once per process, and makes a Status of errno. Only errors depend on it: without it a rank of a large comm
// fails with a bare errno.
#include "bootstrap/descriptors.h"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace tw {

void raise_descriptor_limit() {
  static std::once_flag once;
  std::call_once(once, [] {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
    limit.rlim_cur = limit.rlim_max;
    (void)::setrlimit(RLIMIT_NOFILE, &limit);  // if that is refused, the error is told when it matters
  });
}

int descriptor_shortage() {
  const int probe = ::eventfd(0, EFD_CLOEXEC);
  if (probe < 0) return errno == EMFILE || errno == ENFILE ? errno : 0;
  ::close(probe);
  return 0;
}

Status fail_to_open(int ranks, const char* what) {
  const int error = errno;
  if (error == ENFILE) {
    return fail_errno("cannot {}: this host has no file descriptor left (sysctl fs.file-max raises its limit)", what);
  }
  if (error != EMFILE) return fail_errno("cannot {}", what);
  rlimit limit{};
  (void)::getrlimit(RLIMIT_NOFILE, &limit);
  errno = error;
  return fail_errno(
      "cannot {}: this process has used up its limit of {} file descriptors; a rank of {} needs up to {} beside the "
      "program's own; raise the limit (ulimit -n, or LimitNOFILE of a service)",
      what, limit.rlim_cur, ranks, descriptors_needed(ranks));
}

Status fail_to_receive(int ranks, const char* what) {
  const int shortage = descriptor_shortage();
  errno = shortage != 0 ? shortage : EMFILE;  // the kernel only says that there was no room
  return fail_to_open(ranks, what);
}

}  // namespace tw
