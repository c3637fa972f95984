-- The memory as tables. `kb.store` turns the words behind `--` on a CREATE line and on a column's line into comments of
-- the table and of the column (DESCRIBE, duckdb_columns()). Times of day are ISO 8601 in UTC. JSON columns are text.

CREATE TABLE meta ( -- What this database is.
  key VARCHAR PRIMARY KEY, -- `schema_version`
  value VARCHAR -- its value
);

CREATE TABLE profiles ( -- Where one profiled round's time went: a row per operator and shape.
  id VARCHAR PRIMARY KEY, -- profile id / row number
  profile_id VARCHAR, -- the profile
  run_id VARCHAR, -- the run
  round INTEGER, -- round of the loop, from 1; 0 for the baseline
  stack_id VARCHAR, -- stack that was profiled
  wall_us DOUBLE, -- wall time of the profiled round, µs
  attributed_share DOUBLE, -- share of the wall time that the rows account for, 0 to 1
  operator VARCHAR, -- operator family
  shape VARCHAR, -- axes as text
  problem_name VARCHAR, -- the problem made of it, if any
  dtype VARCHAR, -- dtype of the operator
  calls INTEGER, -- number of calls
  time_us DOUBLE, -- all calls together, µs
  time_share DOUBLE, -- share of the wall time, 0 to 1
  flops DOUBLE, -- operations of one call
  bytes DOUBLE, -- fewest bytes of one call, read and written
  roofline_us DOUBLE, -- time of one call at the roofline, µs
  bound VARCHAR, -- memory, compute, overhead; empty where no ceiling is trusted
  headroom DOUBLE, -- measured time over roofline time
  roofloop VARCHAR, -- version of roofloop
  ruler VARCHAR, -- version of the ruler
  engine VARCHAR, -- engine and version
  target VARCHAR, -- fingerprint of the machine
  target_family VARCHAR, -- cpu, cuda, rocm, neuron
  workload VARCHAR, -- content hash of the workload
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE trials ( -- Trials of the settings search.
  id VARCHAR PRIMARY KEY, -- run, number and hash
  run_id VARCHAR, -- the run
  number INTEGER, -- number of the trial; 0 is the engine's defaults
  knobs JSON, -- knobs as asked for
  resolved_hash VARCHAR, -- identity: hash of what the engine made of them
  resolved JSON, -- what the engine made of them
  status VARCHAR, -- complete, duplicate, pruned, crash, out_of_memory, hang, refused, start, gate_failed
  metric VARCHAR, -- the workload's objective
  value DOUBLE, -- in the metric's unit (its name ends in it)
  gates JSON, -- figures of the gates
  reason VARCHAR, -- why it failed
  seconds DOUBLE, -- time spent, s
  roofloop VARCHAR, -- version of roofloop
  ruler VARCHAR, -- version of the ruler
  engine VARCHAR, -- engine and version
  target VARCHAR, -- fingerprint of the machine
  target_family VARCHAR, -- cpu, cuda, rocm, neuron
  workload VARCHAR, -- content hash of the workload
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE verdicts ( -- What the ruler said. Chained in `ledger`.
  id VARCHAR PRIMARY KEY, -- verdict id
  run_id VARCHAR, -- the run
  campaign_id VARCHAR, -- the campaign, if any
  candidate_id VARCHAR, -- content hash of the candidate
  problem_name VARCHAR, -- the problem
  mode VARCHAR, -- screen or confirm
  status VARCHAR, -- the ruler's status
  law VARCHAR, -- the law that decided it
  reason VARCHAR, -- why
  speedup DOUBLE, -- baseline time over candidate time, estimate
  low DOUBLE, -- lower end of the interval
  high DOUBLE, -- upper end of the interval
  claim DOUBLE, -- the conservative figure that promotion uses
  floor_fraction DOUBLE, -- floor time over candidate time, 0 to 1
  duration_s DOUBLE, -- time that judging took, s
  verdict JSON, -- the ruler's own JSON, untouched
  hash VARCHAR, -- content hash of the file
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE ideas ( -- Ideas as they were born; `ideas_now` has their status and score of today.
  id VARCHAR PRIMARY KEY, -- idea id
  run_id VARCHAR, -- the run
  parent_id VARCHAR, -- the idea it grew from
  hypothesis VARCHAR, -- one sentence
  layer VARCHAR, -- settings, framework, kernel
  lever VARCHAR, -- operator × approach, or knob group
  operator VARCHAR, -- operator family
  problem_id VARCHAR, -- content hash of the problem
  problem_name VARCHAR, -- the problem
  approach VARCHAR, -- what the executor starts from
  time_share DOUBLE, -- share of the end-to-end time at birth, 0 to 1
  headroom DOUBLE, -- measured time over roofline time at birth
  derivation VARCHAR, -- how the expected gain follows from the profile
  accuracy_risk DOUBLE, -- 0 to 1; 1 is excluded
  crash_risk DOUBLE, -- 0 to 1; 1 is excluded
  cost_minutes DOUBLE, -- estimated cost, minutes
  sites JSON, -- what it takes the place of
  axes JSON, -- axes at the shape that counts most
  interacts_with JSON, -- operators whose promoted kernels reopen it
  scope_id VARCHAR -- what the planner was shown
);

CREATE TABLE idea_events ( -- Every change of status and every score of every idea.
  id VARCHAR PRIMARY KEY, -- idea and number, or rescore and idea
  run_id VARCHAR, -- the run
  idea_id VARCHAR, -- the idea
  number INTEGER, -- order of status changes of one idea, from 1; null for scores
  event VARCHAR, -- status, score or excluded
  status VARCHAR, -- new status
  reason VARCHAR, -- why
  cause VARCHAR, -- id of the outcome or end-to-end row that made it
  p_success DOUBLE, -- posterior mean chance of success
  gain DOUBLE, -- expected end-to-end gain, fraction of today's time
  urgency DOUBLE, -- from distance to roofline or peer
  accuracy_penalty DOUBLE, -- 0 to 1
  cost_minutes DOUBLE, -- minutes
  score DOUBLE, -- p_success · gain · urgency · (1 − accuracy_penalty) / cost_minutes
  time_share DOUBLE, -- share that the score was worked out from
  headroom DOUBLE, -- headroom that the score was worked out from
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE campaigns ( -- Ideas handed to executors, with what they were given.
  id VARCHAR PRIMARY KEY, -- campaign id
  run_id VARCHAR, -- the run
  round INTEGER, -- round of the loop
  idea_id VARCHAR, -- the idea
  operator VARCHAR, -- operator family
  lever VARCHAR, -- operator × approach
  problem_name VARCHAR, -- the problem
  families JSON, -- template families allowed
  languages JSON, -- languages allowed
  budget_s DOUBLE, -- budget, s
  seed BIGINT, -- seed of its search
  threads INTEGER, -- threads of a kernel
  scope_id VARCHAR, -- what the executor was shown
  warm_starts JSON, -- configurations to try first
  crash_sets JSON, -- combinations it must not try
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE attempts ( -- Candidates of campaigns and what became of each.
  id VARCHAR PRIMARY KEY, -- campaign, number and hash
  campaign_id VARCHAR, -- the campaign
  number INTEGER, -- order within it
  candidate_id VARCHAR, -- content hash of the candidate
  verdict_id VARCHAR, -- the verdict, if it was judged
  status VARCHAR, -- status of the verdict, or not_judged
  speedup DOUBLE, -- estimate
  low DOUBLE, -- lower end of the interval
  high DOUBLE, -- upper end of the interval
  claim DOUBLE, -- conservative figure
  parameters JSON, -- template parameters
  seconds DOUBLE, -- time spent, s
  mode VARCHAR, -- screen or confirm
  note VARCHAR -- a remark
);

CREATE TABLE outcomes ( -- What each campaign came to.
  id VARCHAR PRIMARY KEY, -- campaign id; failed ones carry a hash too, since they may be tried again
  campaign_id VARCHAR, -- the campaign
  run_id VARCHAR, -- the run
  idea_id VARCHAR, -- the idea
  operator VARCHAR, -- operator family
  lever VARCHAR, -- operator × approach
  problem_name VARCHAR, -- the problem
  conclusion VARCHAR, -- won, did_not_win, refused, failed
  reason VARCHAR, -- why
  candidate_id VARCHAR, -- best candidate
  verdict_id VARCHAR, -- the verdict it stands on
  speedup DOUBLE, -- estimate
  low DOUBLE, -- lower end of the interval
  high DOUBLE, -- upper end of the interval
  attempts INTEGER, -- number of attempts
  seconds DOUBLE, -- time spent, s
  parameters JSON, -- parameters of the best candidate
  shapes JSON, -- shapes at which it wins
  axes JSON, -- all axes at the shape that counts most
  dtype VARCHAR, -- dtype of the problem
  constraints JSON, -- under what it holds
  roofloop VARCHAR, -- version of roofloop
  ruler VARCHAR, -- version of the ruler
  engine VARCHAR, -- engine and version
  target VARCHAR, -- fingerprint of the machine
  target_family VARCHAR, -- cpu, cuda, rocm, neuron
  workload VARCHAR, -- content hash of the workload
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE end_to_end ( -- End-to-end comparisons of stacks. Chained in `ledger`.
  id VARCHAR PRIMARY KEY, -- id
  run_id VARCHAR, -- the run
  purpose VARCHAR, -- baseline, settings, promotion, final
  idea_id VARCHAR, -- the idea that was tried
  stack_id VARCHAR, -- the stack
  against_stack_id VARCHAR, -- what it was compared with
  metric VARCHAR, -- the workload's objective
  value DOUBLE, -- of the stack, in the metric's unit
  against_value DOUBLE, -- of the other, in the metric's unit
  ratio DOUBLE, -- improvement, above 1 is better
  low DOUBLE, -- lower end of the interval
  high DOUBLE, -- upper end of the interval
  rounds INTEGER, -- interleaved rounds
  visible_ratio DOUBLE, -- ratio on visible prompts
  hidden_ratio DOUBLE, -- ratio on hidden prompts
  accuracy JSON, -- figures of the accuracy gate
  decision VARCHAR, -- promoted, rejected, measured
  reason VARCHAR, -- why
  raw_file VARCHAR, -- raw result, relative to the run's folder
  hash VARCHAR, -- content hash of the file
  roofloop VARCHAR, -- version of roofloop
  ruler VARCHAR, -- version of the ruler
  engine VARCHAR, -- engine and version
  target VARCHAR, -- fingerprint of the machine
  target_family VARCHAR, -- cpu, cuda, rocm, neuron
  workload VARCHAR, -- content hash of the workload
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE lessons ( -- Lessons as they were learnt; `lessons_now` has their record of today.
  id VARCHAR PRIMARY KEY, -- hash of key, parameters and source
  operator VARCHAR, -- scope: operator family
  shape_class VARCHAR, -- scope: axes rounded to powers of four
  dtype VARCHAR, -- scope: dtype
  target VARCHAR, -- scope: fingerprint of the machine, or `any`
  engine VARCHAR, -- scope: engine and version, or `any`
  lever VARCHAR, -- operator × approach
  statement VARCHAR, -- one sentence
  axes JSON, -- axes of the problem it was learnt on
  parameters JSON, -- tuned configuration, if it is one
  speedup DOUBLE, -- measured over the baseline
  source VARCHAR, -- `outcome`, or where seed knowledge is from
  evidence JSON, -- ids of the outcomes it was born with
  wins INTEGER, -- wins it was born with
  losses INTEGER, -- losses it was born with
  last_confirmed VARCHAR, -- when it was last seen to hold, at birth
  expires VARCHAR -- end of its life, at birth
);

CREATE TABLE evidence ( -- Events in the life of lessons, rules and crash sets.
  id VARCHAR PRIMARY KEY, -- subject, cause and effect
  subject VARCHAR, -- lesson, rule, crash_set
  subject_id VARCHAR, -- which
  effect VARCHAR, -- win, loss, seen, retired, restored
  because VARCHAR, -- outcome or end-to-end id, or a sentence
  at_utc VARCHAR, -- when, ISO 8601
  expires VARCHAR -- new end of the subject's life, if it moved
);

CREATE TABLE rules ( -- Instructions shown to agents; `rules_now` has their record of today.
  id VARCHAR PRIMARY KEY, -- rule id
  text VARCHAR, -- the instruction
  scope JSON, -- keys that must match for it to be shown
  origin VARCHAR, -- who wrote it, from what
  wins INTEGER, -- wins it was born with
  losses INTEGER, -- losses it was born with
  retired VARCHAR -- reason, if it was born retired
);

CREATE TABLE crash_sets ( -- Smallest known combinations that crash; `crash_sets_now` has their record of today.
  id VARCHAR PRIMARY KEY, -- hash of scope, combination and failure
  scope JSON, -- operator, engine, target ...
  combination JSON, -- knobs or parameters with their values
  failure VARCHAR, -- crash, hang, out_of_memory, wrong_output
  detail VARCHAR, -- what was seen
  versions JSON, -- versions it was seen on
  seen INTEGER, -- times seen at birth
  expires VARCHAR -- end of its life, at birth
);

CREATE TABLE scopes ( -- Exactly what a planner or executor was shown.
  id VARCHAR PRIMARY KEY, -- scope id
  run_id VARCHAR, -- the run
  purpose VARCHAR, -- plan or campaign:<id>
  text VARCHAR, -- the words
  lessons JSON, -- lesson ids in it
  rules JSON, -- rule ids in it
  crash_sets JSON, -- crash set ids in it
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE claims ( -- What agents said. Never read by scores, lessons or rules.
  id VARCHAR PRIMARY KEY, -- subject and hash
  run_id VARCHAR, -- the run
  subject VARCHAR, -- campaign or idea
  claims JSON, -- the words and figures
  at_utc VARCHAR -- when, ISO 8601
);

CREATE TABLE ledger ( -- Hash chain over verdict and end-to-end files, in the order they were ingested.
  number BIGINT PRIMARY KEY, -- position, from 1
  kind VARCHAR, -- verdicts or end_to_end
  id VARCHAR, -- id of the row
  hash VARCHAR, -- content hash of its file
  head VARCHAR -- sha256 of the previous head and this line
);

CREATE VIEW ideas_now AS
SELECT i.* EXCLUDE (time_share, headroom, cost_minutes),
  coalesce(s.time_share, i.time_share) AS time_share, coalesce(s.headroom, i.headroom) AS headroom, i.cost_minutes,
  coalesce(e.status, 'open') AS status, coalesce(e.reason, '') AS reason, coalesce(e.number, 0) AS number, e.cause,
  e.at_utc AS changed, s.p_success, s.gain, s.urgency, s.accuracy_penalty, s.score, s.reason AS why, s.event = 'excluded' AS excluded
FROM ideas i
LEFT JOIN (SELECT idea_id, arg_max(status, number) AS status, arg_max(reason, number) AS reason, arg_max(at_utc, number) AS at_utc,
    arg_max(cause, number) AS cause, max(number) AS number FROM idea_events WHERE event = 'status' GROUP BY idea_id) e
  ON e.idea_id = i.id
LEFT JOIN (SELECT * FROM idea_events WHERE event <> 'status'
    QUALIFY row_number() OVER (PARTITION BY idea_id ORDER BY at_utc DESC, id DESC) = 1) s
  ON s.idea_id = i.id;

CREATE VIEW records_now AS
SELECT subject, subject_id, count(*) FILTER (effect = 'win') AS wins, count(*) FILTER (effect = 'loss') AS losses,
  count(*) FILTER (effect = 'seen') AS seen, max(at_utc) FILTER (effect IN ('win', 'seen')) AS last_confirmed,
  arg_max(expires, at_utc) AS expires, list(because ORDER BY at_utc, id) FILTER (effect IN ('win', 'loss', 'seen')) AS evidence,
  CASE WHEN arg_max(effect, at_utc) FILTER (effect IN ('retired', 'restored')) = 'retired'
    THEN arg_max(because, at_utc) FILTER (effect = 'retired') END AS retired
FROM evidence GROUP BY subject, subject_id;

CREATE VIEW lessons_now AS
SELECT l.* EXCLUDE (wins, losses, last_confirmed, expires, evidence), l.wins + coalesce(n.wins, 0) AS wins,
  l.losses + coalesce(n.losses, 0) AS losses, coalesce(n.last_confirmed, l.last_confirmed) AS last_confirmed,
  coalesce(n.expires, l.expires) AS expires, to_json(coalesce(n.evidence, [])) AS evidence, n.retired
FROM lessons l LEFT JOIN records_now n ON n.subject = 'lesson' AND n.subject_id = l.id;

CREATE VIEW rules_now AS
SELECT r.* EXCLUDE (wins, losses, retired), r.wins + coalesce(n.wins, 0) AS wins, r.losses + coalesce(n.losses, 0) AS losses,
  CASE WHEN n.subject_id IS NULL THEN r.retired ELSE n.retired END AS retired
FROM rules r LEFT JOIN records_now n ON n.subject = 'rule' AND n.subject_id = r.id;

CREATE VIEW crash_sets_now AS
SELECT c.* EXCLUDE (seen, expires), c.seen + coalesce(n.seen, 0) AS seen, coalesce(n.expires, c.expires) AS expires, n.retired
FROM crash_sets c LEFT JOIN records_now n ON n.subject = 'crash_set' AND n.subject_id = c.id;

CREATE VIEW results AS -- One row per campaign that came to an end: did it work, by the last measurement that says so.
SELECT o.id, o.run_id, o.idea_id, o.operator, o.lever, o.target_family, o.ruler, o.speedup,
  CASE WHEN o.conclusion = 'won' AND coalesce(e.decision, 'promoted') = 'promoted' THEN 1 ELSE 0 END AS success
FROM outcomes o
LEFT JOIN (SELECT run_id, idea_id, arg_max(decision, at_utc) AS decision FROM end_to_end
    WHERE purpose = 'promotion' AND decision <> 'measured' AND idea_id IS NOT NULL GROUP BY run_id, idea_id) e
  ON e.run_id = o.run_id AND e.idea_id = o.idea_id
WHERE o.conclusion <> 'failed';
