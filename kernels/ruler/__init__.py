"""The ruler: says how fast a candidate is, in a way that the candidate cannot bend.

Promises
* The clock, the inputs, the reference, the comparison and the verdict live in a process of the ruler's own that never
  imports, links, loads or unpickles anything of a candidate. Of what a candidate's process says, only the bytes of its
  output buffer are believed (and one answer byte a call, which can only hurt it).
* A worker is frozen except between the start mark and its answer, and the end mark is read once it is frozen again.
  Inputs are written while it is frozen, into memory that it can only read; outputs lie poisoned between guard words.
* Every timed call gets values of its own, and every element of every timed output is checked against a budget that is
  derived from a float64 reference. Hidden shapes, other scalars and value regimes are checked after the timing.
* Baseline and candidate are fresh workers of the same code with the same cores, environment and call history; each
  turn runs both on the same values, and who goes first changes. The baseline is the best of the eager reference, the
  vendor's fused operator and (when confirming) torch.compile.
* A win is an interval that lies above a threshold taken from A/A measurements on this machine. Where the ruler's own
  cost, a busy machine or drift forbid a conclusion, the verdict is `unresolved`. Faster than physics is `void`.
* Side effects are kept in by whatever this machine offers (`sandbox`); the level reached is part of the verdict.

Does not promise
* That it cannot be attacked through the kernel or the processor: confinement is the kernel's, and what one core leaks
  to another is not looked at.
* That a valid kernel is new (`provenance` is a second verdict, with its evidence) or right on inputs outside the
  problem's declared shapes, dtypes and regimes.
* Resolution below the handshake: a call must take some microseconds, or thousands of calls in one handshake still leave
  the ruler's cost above 5 % and the verdict `unresolved`.
* Figures that hold on another machine, at another thread count or beside other work.

Workers are not exec'ed one by one: a template process is, imports torch, runs nothing else, and forks them.

Reading order: `spec`, `judge`, `session`, `inputs`, `compare`, `timing`, `stats`, `floor`, `verdict`; then `workers`,
`handle`, `worker`, `sandbox`, `cgroup`, `build`; then `pretest`, `provenance`, `canaries`, `suite`, `lease`.
"""
