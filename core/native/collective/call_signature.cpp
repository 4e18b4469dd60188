#include <netfold/collective/call_signature.hpp>
#include <netfold/collective/contribution_map.hpp>

#include <algorithm>
#include <iterator>

namespace netfold::collective {
namespace {

constexpr int kElementBits = 5;
static_assert(kElementCount <= 1 << kElementBits);

CallForm with_average(CallForm form, bool average) {
  return average ? static_cast<CallForm>(static_cast<std::uint8_t>(form) + 1) : form;
}

bool is_average(CallForm form) {
  return form == CallForm::all_reduce_avg || form == CallForm::reduce_avg || form == CallForm::reduce_scatter_avg ||
         form == CallForm::step_avg;
}

constexpr CallForm kRooted[CallSignature::kRootedForms] = {CallForm::reduce, CallForm::reduce_avg, CallForm::broadcast};

// The place in kRooted; kRootedForms for a form without a root.
unsigned rooted_number(CallForm form) {
  return static_cast<unsigned>(std::find(std::begin(kRooted), std::end(kRooted), form) - std::begin(kRooted));
}
bool has_root(CallForm form) { return rooted_number(form) < CallSignature::kRootedForms; }

CallForm form_of(const Call& call) {
  const bool average = call.average != Averaging::none || (call.step_of & kStepOfAverage) != 0;
  switch (call.kind) {
    case Kind::all_reduce:
      return with_average(call.step_of != 0 ? CallForm::step : CallForm::all_reduce, average);
    case Kind::reduce:
      return with_average(CallForm::reduce, average);
    case Kind::reduce_scatter:
      return with_average(CallForm::reduce_scatter, average);
    case Kind::broadcast:
      return CallForm::broadcast;
    case Kind::all_gather:
      return CallForm::all_gather;
    default:
      return CallForm::barrier;
  }
}

const char* name_of(CallForm form) {
  constexpr const char* kNames[kCallFormCount] = {
      "all_reduce",          "all_reduce", "reduce",     "reduce",  "reduce_scatter",
      "reduce_scatter",      "broadcast",  "all_gather", "barrier", "a step of all_reduce",
      "a step of all_reduce"};
  return kNames[static_cast<std::uint8_t>(form)];
}

}  // namespace

CallSignature CallSignature::of(const Call& call) {
  CallSignature signature{.form = form_of(call)};
  if (signature.form != CallForm::barrier) signature.element = call.element();
  const int root = call.whole_root >= 0 ? call.whole_root : call.root;
  if (has_root(signature.form)) signature.root = static_cast<std::uint8_t>(root);
  return signature;
}

std::uint16_t CallSignature::packed() const {
  const unsigned what = rooted_number(form) << 8 | (has_root(form) ? root : static_cast<unsigned>(form));
  return static_cast<std::uint16_t>(static_cast<unsigned>(element) | what << kElementBits);
}

std::optional<CallSignature> CallSignature::unpacked(std::uint16_t bits) {
  const auto element = static_cast<std::uint8_t>(bits & ((1 << kElementBits) - 1));
  const unsigned number = bits >> (8 + kElementBits);
  const auto low = static_cast<std::uint8_t>(bits >> kElementBits);
  if (number > kRootedForms || !is_valid_element(element)) return std::nullopt;
  CallSignature signature{.element = static_cast<Element>(element)};
  if (number < kRootedForms) {
    signature.form = kRooted[number];
    signature.root = low;
    return signature;
  }
  signature.form = static_cast<CallForm>(low);
  if (low >= kCallFormCount || has_root(signature.form)) return std::nullopt;
  return signature;
}

bool CallSignature::has_blocks() const {
  return form == CallForm::all_gather || form == CallForm::reduce_scatter || form == CallForm::reduce_scatter_avg;
}

std::string CallSignature::text(std::uint32_t operation, std::uint32_t elements, kernels::ReduceOp reduce) const {
  std::string text = std::string(name_of(form)) + " #" + std::to_string(operation);
  if (form == CallForm::barrier) return text;
  const char* const of = name(element);
  const bool is_coalesced = !has_blocks() && (elements & ContributionMap::kCoalescedDigest) != 0;
  text += is_coalesced ? coalesced_text(elements) + " " + of
          : has_blocks()
              ? std::string(" of ") + of + " (digest of all sizes: " + std::to_string(elements & 0xffff) + ")"
              : " of " + std::to_string(elements / static_cast<unsigned>(carried_values(element))) + " " + of;
  const bool moves = form == CallForm::broadcast || form == CallForm::all_gather;
  std::string how = moves ? "" : is_average(form) ? "avg" : kernels::name(reduce);
  if (has_root(form)) how += (how.empty() ? "root " : ", root ") + std::to_string(root);
  return how.empty() ? text : text + " (" + how + ")";
}

}  // namespace netfold::collective
