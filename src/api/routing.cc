// A checked routing as the core takes it: copied, told to a device, or the share of it that a token replica sends with
// a digest of all. check.cc has looked at every id and weight; strides of a single row may be anything, and are not
// followed here.
//
// What breaks if this changes: token replicas whose digests leave an id or a weight out take sums of other tokens for
// their own.
#include <bit>

#include "api/check.h"

namespace tw::api {

void copy_routing(const Shape& shape, const CheckedRouting& checked, Routing* routing) {
  routing->tokens = checked.tokens;
  for (int64_t token = 0; token < checked.tokens; ++token) {
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const int64_t at = token * shape.top_k + k;
      routing->ids[at] = static_cast<int32_t>(id_at(*checked.ids, token, k));
      routing->weights[at] = 1.0f;
      if (checked.weights == nullptr) continue;
      const twTensor_t& weights = *checked.weights;
      routing->weights[at] = static_cast<const float*>(weights.data)[place_of(weights, token, k)];
    }
  }
}

RoutingShare::RoutingShare(const twGroup& group, const CheckedRouting& all) : ids(*all.ids), weights{}, begin(0) {
  const ReplicaSet& set = group.context.replicas;
  begin = set.begin(all.tokens, set.place);
  tokens = set.count(all.tokens, set.place);
  if (all.weights != nullptr) weights = *all.weights;
  for (twTensor_t* const tensor : {&ids, &weights}) {
    if (tensor->data == nullptr) continue;
    const int64_t stride = all.tokens > 1 ? tensor->stride[0] : 0;
    tensor->data = static_cast<std::byte*>(tensor->data) + begin * stride * dtype_bytes(tensor->dtype);
    tensor->shape[0] = tokens;
  }
}

uint32_t choices_digest(const Shape& shape, const CheckedRouting& all) {
  uint32_t sum = 0;
  for (int64_t token = 0; token < all.tokens; ++token) {
    for (int32_t k = 0; k < shape.top_k; ++k) {
      const int64_t id = id_at(*all.ids, token, k);
      float weight = 1.0f;
      if (id >= 0 && all.weights != nullptr) {  // weights of no expert are read by nobody, and often not written
        weight = static_cast<const float*>(all.weights->data)[place_of(*all.weights, token, k)];
      }
      sum += choice_digest(static_cast<uint32_t>(token * shape.top_k + k), static_cast<uint32_t>(id < 0 ? -1 : id),
                           std::bit_cast<uint32_t>(weight));
    }
  }
  return sum;
}

RoutingSource source_of(const CheckedRouting& checked) {
  RoutingSource source;
  const auto strides = [](const twTensor_t& tensor, int64_t to[2]) {
    for (const int i : {0, 1}) to[i] = tensor.shape[i] > 1 ? tensor.stride[i] : 0;
  };
  source.unread = true;
  source.ids = checked.ids->data;
  source.id_dtype = checked.ids->dtype;
  strides(*checked.ids, source.id_stride);
  if (checked.weights == nullptr) return source;
  source.weights = static_cast<const float*>(checked.weights->data);
  strides(*checked.weights, source.weight_stride);
  return source;
}

}  // namespace tw::api
